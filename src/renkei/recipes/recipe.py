"""A recipe: settings that a user may change, and the two functions that make data and model of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from renkei.communicators.requested import read_name
from renkei.gradients.compression.names import AUTO, WIRES
from renkei.names import check_known

if TYPE_CHECKING:
    from torch import nn

    from renkei.data.datasets import ImageDataset


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):  # to Python a number, 0 or 1
        raise ValueError("input should be a number, not true or false")
    return value


def _known_communicator(name: str) -> str:
    read_name(name)
    return name


def _known_wire(name: str) -> str:
    check_known("wire", name, (AUTO, *WIRES))
    return name


Integer = Annotated[int, BeforeValidator(_no_boolean)]
Number = Annotated[float, BeforeValidator(_no_boolean)]
Count = Annotated[Integer, Field(ge=1)]
Share = Annotated[Number, Field(ge=0, lt=1)]
CommunicatorName = Annotated[
    str,
    BeforeValidator(lambda name: "null" if name is None else name),  # one is called what YAML takes for nothing
    AfterValidator(_known_communicator),
]


WireName = Annotated[str, AfterValidator(_known_wire)]


class Settings(BaseModel):
    """What a user may change about a recipe. Nothing in it is per rank."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epochs: Count
    global_batch_size: Annotated[Count, Field(description="samples a step, over all ranks")]
    micro_batch_size: Annotated[Count | None, Field(description="samples a rank computes at once")] = None
    evaluation_batch_size: Count = 512
    learning_rate: Annotated[Number, Field(gt=0, description="at its peak")]
    warmup_epochs: Annotated[Number, Field(ge=0)] = 0.0
    momentum: Share = 0.9
    nesterov: bool = True
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    label_smoothing: Share = 0.0
    dropout: Share = 0.0
    seed: Annotated[Integer, Field(ge=0)] = 0
    data: Annotated[str | None, Field(description="folder of the data")] = None
    communicator: Annotated[CommunicatorName, Field(description="algorithm, or algorithm/backend")] = "auto"
    wire: Annotated[WireName, Field(description="how 32-bit gradients travel; auto: as suits the network")] = "fp32"
    double_buffering: Annotated[
        bool | None, Field(description="step with the gradients of the step before; null: if wire=auto says so")
    ] = None
    threads: Annotated[Count | None, Field(description="per rank; else OMP_NUM_THREADS, else cores by ranks")] = None
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
