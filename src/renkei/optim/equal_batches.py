"""That ranks may count equally: they hold equally many samples of each batch, as far as loaders know."""

from __future__ import annotations

from collections.abc import Iterable

from renkei.data.sharding import Share
from renkei.errors import UnevenBatchError


def check_equal_batches(shares: Iterable[Share]) -> None:
    """Raise `UnevenBatchError` if ranks get different numbers of samples of some batch.

    Args:
        shares: how the batches that are out were cut.
    """
    for share in shares:
        if share.uneven is not None:
            fewest, most = share.uneven
            raise UnevenBatchError(
                f"of some batches in an epoch, ranks get {fewest} or {most} samples, so their mean losses must not "
                "count equally; in place of loss.backward(), call optimizer.backward(loss, weight=len(x)), or let "
                "the number of ranks divide both the global batch size and the number of samples"
            )
