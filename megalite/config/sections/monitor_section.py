"""The section [monitor] of RUN.toml: what a run reports of itself, and where to."""

from typing import Annotated, Literal

from pydantic import Field

from megalite.config.sections.section import Count, Lenient, Section, Text


class MonitorConfig(Section):
    """Reports during training; metrics.jsonl always has every step."""

    every: Count = Field(1, description="steps between console lines")
    console: Literal["auto", "plain", "live"] = Field(
        "auto",
        description='"live": a live view on any terminal, "plain": lines, "auto": live from 60 columns',
    )
    report_to: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "csv"], ...], Lenient] = Field(
        (), description='where metrics go besides metrics.jsonl, as in ["tensorboard", "wandb"]'
    )
    project: Text | None = Field(
        None, description="project of Weights & Biases, experiment of MLflow; default: by their variables"
    )
    run_name: Text | None = Field(
        None, description="name of the run there; default: WANDB_NAME, or the last part of run.folder"
    )
    entity: Text | None = Field(
        None, description="user or team of Weights & Biases; default: WANDB_ENTITY, or the user's own"
    )
    group: Text | None = Field(
        None, description="group of runs in Weights & Biases; default: WANDB_RUN_GROUP"
    )
    log_checkpoints: bool = Field(False, description="also upload every checkpoint to wandb and mlflow")
    tensorboard_folder: Text | None = Field(
        None, description="folder of TensorBoard's files; default: run.folder/tensorboard"
    )
    csv_folder: Text | None = Field(None, description="folder of metrics.csv; default: run.folder")
    peak_tflops: float | None = Field(
        None, gt=0, description="peak TFLOP/s of one device, for MFU; default: its data sheet's"
    )
    profile_steps: Annotated[tuple[Count, ...], Lenient] = Field(
        (), description="steps to profile with torch.profiler, as in [20, 21]: run.folder/profiles"
    )
    profile_ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Lenient] = Field(
        (0,), description="ranks that are profiled in these steps"
    )
    trace_steps: Annotated[tuple[Count, ...], Lenient] = Field(
        (), description="steps of which each rank writes a trace, for megalite timeline"
    )
    layers_every: Annotated[int, Field(ge=0)] = Field(
        0, description="steps between records of each layer's gradient, weight and update norms; 0: none"
    )
    self_check_every: Annotated[int, Field(ge=0)] = Field(
        0, description="steps between comparisons of all copies of each tensor, also before saves; 0: none"
    )
    on_hang: Literal["stop", "report", "off"] = Field(
        "stop", description="reaction to a hang: report, and end the run later; report alone; none"
    )
    hang_seconds: float = Field(
        60.0, gt=0, description="seconds beyond twice the median step after which a run hangs"
    )
