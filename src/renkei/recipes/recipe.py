"""A recipe: settings that a user may change, and the two functions that make data and model of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from torch import nn

    from renkei.data.datasets import ImageDataset

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """What a user may change about a recipe. Nothing in it is per rank."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epochs: Count
    global_batch_size: Annotated[Count, Field(description="samples a step, over all ranks")]
    micro_batch_size: Annotated[Count | None, Field(description="samples a rank computes at once")] = None
    evaluation_batch_size: Count = 512
    learning_rate: Annotated[float, Field(gt=0, description="at its peak")]
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    momentum: Share = 0.9
    nesterov: bool = True
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    label_smoothing: Share = 0.0
    dropout: Share = 0.0
    seed: Annotated[int, Field(ge=0)] = 0
    data: Annotated[str | None, Field(description="folder of the data")] = None
    communicator: Annotated[str, Field(description="algorithm, or algorithm/backend")] = "flat"
    threads: Annotated[Count | None, Field(description="per rank; cores divided by ranks if not given")] = None
    report_every: Annotated[Count, Field(description="steps")] = 10


@dataclass(frozen=True)
class Recipe:
    """What is trained on what.

    Attributes:
        name: as on the command line.
        summary: in a line.
        settings: the defaults.
        load: the training set and the set to evaluate on.
        build: the model, with weights from torch's default generator.
    """

    name: str
    summary: str
    settings: Settings
    load: Callable[[Settings], tuple[ImageDataset, ImageDataset]]
    build: Callable[[Settings], nn.Module]
