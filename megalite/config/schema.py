"""Every setting of a run: its name, type, limits, default and the sentence that `--help` prints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from megalite.config.shape_settings import model_shape, shape_settings
from megalite.topology.axes import Layout
from megalite.topology.parameter_groups import ParameterGroup
from megalite.topology.schedules import SCHEDULES
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit, pipeline_split

# Above any size in use, and small enough that every rule can list the neighbours of a value at once.
Count = Annotated[int, Field(ge=1, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# They only say where other values come from, and are gone from a resolved run.
STARTING_POINTS = {"model": ("preset", "hf_config"), "deepspeed": ("config",)}

# A TOML array is a list, and frozen models hold tuples.
Lenient = Field(strict=False)


class Section(BaseModel):
    """A section of RUN.toml; unknown keys and values of another type are refused, since TOML has types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class RunSection(Section):
    """Where the run writes, and what its randomness starts from."""

    folder: Text = Field("runs/default", description="all that the run writes")
    seed: int = Field(1234, ge=0, lt=2**63, description="of initial weights, data order and dropout")


class _StartingPoint(Section):
    preset: Text | None = Field(
        None,
        description="a shape by name; keys beside it take precedence, but a flag's preset over a file's keys",
    )
    hf_config: Text | None = Field(
        None,
        description="a Hugging Face config.json, its folder or Hub name to take the shape from, likewise",
    )
    weights: Text | None = Field(
        None,
        description="a Hugging Face folder, or org/name[@revision] of its Hub, to start from; its shape too",
    )


if TYPE_CHECKING:

    class _ShapeSettings(_StartingPoint):
        def __getattr__(self, name: str) -> Any: ...
else:
    _ShapeSettings = create_model("_ShapeSettings", __base__=_StartingPoint, **shape_settings())


class ModelConfig(_ShapeSettings):
    """The model's shape, in the words of Hugging Face's config.json."""

    embedding_dropout: Fraction = Field(
        0.0, description="share of the embedding's output dropped in training"
    )
    residual_dropout: Fraction = Field(
        0.0, description="of what attention and MLP add to the residual stream"
    )
    mlp_dropout: Fraction = Field(0.0, description="of the MLP's activations")
    attention_dropout: Fraction = Field(0.0, description="of its probabilities; compiled kernels draw it")
    kernels: Literal["auto", "fused", "reference"] = Field(
        "auto", description='compiled operators, or plain torch; "auto": compiled where they are built'
    )
    chunked_loss: int = Field(0, ge=0, lt=2**31, description="tokens whose logits exist at once; 0: all")

    def shape(self, vocab_size: int) -> ModelShape:
        """Return the shape; `vocab_size` (the tokenizer's) counts where the setting is "auto"."""
        return model_shape(self, vocab_size)


class ParallelConfig(Section):
    """How the model and the batch are cut up; every size is a number of ranks."""

    tensor: Count = Field(1, description="ranks that share each layer")
    sequence: bool = Field(
        False, description="split what stands between attention and MLP over the tensor ranks, by positions"
    )
    pipeline: Count = Field(1, description="stages that the layers are spread over")
    data: Count | Literal["auto"] = Field(
        "auto", description='replicas; "auto": what the launcher started, else 1'
    )
    schedule: Literal[
        "1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"
    ] = Field("1f1b", description="order of forwards and backwards in the pipeline")
    virtual_stages: Count | Literal["auto"] = Field(
        "auto", description='chunks of layers a stage; "auto": 1 for 1f1b and gpipe, 2 for the others'
    )
    layers_per_stage: Annotated[tuple[Count, ...], Lenient] | None = Field(
        None, description="layers of each chunk in the model's order, [3, 5]; default: balanced"
    )


class TrainingConfig(Section):
    """How much is trained, and in which portions.

    global_batch_size = micro_batch_size * micro_batches * parallel.data; two of the first three give the third.
    """

    steps: Count | None = Field(None, description="updates; or name epochs")
    epochs: float | None = Field(None, gt=0, description="passes over the data; or name steps")
    sequence_length: Count = Field(description="tokens a sequence")
    micro_batch_size: Count | None = Field(None, description="sequences that a rank computes at once")
    micro_batches: Count | None = Field(None, description="micro batches a step of each replica")
    global_batch_size: Count | None = Field(None, description="sequences a step, over all replicas")
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = Field(
        "auto",
        description='number type of weights and activations; "auto": what DeepSpeed\'s JSON enables, else what the '
        "run resumes with, else bf16 where the machine gains by it and fp32 where not",
    )
    accumulation: Literal["fp32", "model"] = Field(
        "fp32", description='number type in which gradients are summed; "model": that of the weights'
    )
    loss_scale: Annotated[float, Field(gt=0)] | Literal["dynamic"] = Field(
        "dynamic", description="fp16: what the loss is multiplied by; a number stays as it is"
    )
    initial_loss_scale_power: int = Field(
        16, ge=0, le=64, description="fp16: the dynamic loss scale starts at 2 to this power"
    )
    loss_scale_window: Count = Field(
        1000, description="fp16: steps in a row without an overflow that double the loss scale"
    )
    loss_scale_hysteresis: Count = Field(
        1, description="fp16: the overflow since the last doubling that halves the loss scale"
    )
    minimum_loss_scale: Count = Field(1, description="fp16: an overflow at this loss scale ends the run")
    nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="what a gradient that is not finite does: end the run, or leave the step out"
    )
    nonfinite_limit: Count = Field(10, description="so many steps left out in a row end the run after all")
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="what backward computes again to keep less: attention's core (selective), whole layers (full)",
    )
    recompute_layers: Count | None = Field(
        None, description="only the first so many layers of each chunk of a stage"
    )
    recompute_ratio: float | None = Field(
        None, gt=0, le=1, description="only this share of each chunk's layers, evenly spread, rounded up"
    )
    compile: bool = Field(False, description="decoder layers through torch.compile; needs a C++ compiler")
    label_smoothing: Fraction = Field(
        0.0, description="share of each target spread over the vocabulary; the reported loss has it"
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="weight of the squared log of the softmax's normaliser; the reported loss has it",
    )
    threads: Count | Literal["auto"] = Field(
        "auto", description='a rank; "auto": the machine\'s cores shared'
    )


class ParameterGroupConfig(Section):
    """Parameters with a learning rate and a weight decay of their own."""

    pattern: Text = Field(description="glob over canonical names; the first group that matches counts")
    learning_rate_ratio: float = Field(1.0, ge=0, description="times the learning rate")
    weight_decay: float | None = Field(None, ge=0, description="default: as without the group")

    @property
    def group(self) -> ParameterGroup:
        return ParameterGroup(self.pattern, self.learning_rate_ratio, self.weight_decay)


class OptimizerConfig(Section):
    """The update rule and the learning rate over time."""

    name: Literal["adamw", "sgd"] = Field("adamw", description="update rule")
    learning_rate: float = Field(3e-4, gt=0, description="at its peak")
    betas: Annotated[tuple[Fraction, Fraction], Lenient] = Field((0.9, 0.95), description="adamw's averages")
    eps: float = Field(1e-8, gt=0, description="adamw's denominator")
    weight_decay: float = Field(0.1, ge=0, description="decoupled for adamw; not on norms and biases")
    gradient_clipping: float = Field(1.0, ge=0, description="largest global norm of the gradient; 0: off")
    clip_value: float = Field(
        0.0, ge=0, description="largest magnitude of a gradient's element, cut before the norm; 0: off"
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description='decay after the warm-up; "wsd": only at the end'
    )
    warmup_steps: int = Field(0, ge=0, lt=2**31, description="steps of linear warm-up")
    minimum_ratio: float = Field(0.1, ge=0, le=1, description="the decay ends at this share of the peak")
    decay_steps: Count | None = Field(None, description="step at which the decay ends; default: the last")
    decay_fraction: float = Field(
        0.1, gt=0, le=1, description="wsd's: share of decay_steps in which it decays"
    )
    decay_shape: Literal["sqrt", "linear"] = Field("sqrt", description="wsd's: 1 - sqrt, or evenly")
    momentum: float = Field(0.0, ge=0, lt=1, description="sgd's")
    ema_decay: Fraction = Field(
        0.0, description="share of the old in a moving average of the weights, kept in checkpoints; 0: none"
    )
    groups: Annotated[tuple[ParameterGroupConfig, ...], Lenient] = Field(
        (), description="[[optimizer.groups]] of parameters: pattern, learning_rate_ratio, weight_decay"
    )


class DeepSpeedSection(Section):
    """DeepSpeed's own JSON: a file, or its words as keys and tables here ([deepspeed.zero_optimization])."""

    model_config = ConfigDict(extra="allow")

    config: Text | None = Field(None, description="the JSON file, from here or from the folder of RUN.toml")
    native_optimizer: bool = Field(False, description="DeepSpeed's own AdamW under ZeRO, compiled once")

    @property
    def passed_on(self) -> Mapping[str, Any]:
        """What DeepSpeed is given as it stands."""
        return self.model_extra or {}


class TokenizerConfig(Section):
    """An existing tokenizer, or one to train on [data]."""

    path: Text | None = Field(
        None,
        description="Hugging Face folder or tokenizer.json, sentencepiece .model, or GPT-2's vocab.json folder",
    )
    vocab_size: Count | None = Field(None, description="train one with so many ids")
    kind: Literal["bpe", "unigram", "sentencepiece_bpe"] = Field(
        "bpe", description="what is trained: byte-level BPE, or sentencepiece's unigram or BPE"
    )
    end_of_document: Text | None = Field(
        None,
        description="token that closes a document; default: the tokenizer's own eos_token, else <|endoftext|>",
    )


class BlendPart(Section):
    """One of several sets that a run's samples are drawn from."""

    source: Text | Annotated[tuple[Text, ...], Lenient] = Field(description="as data.source")
    weight: float = Field(description="share of the samples, against the others' weights")
    text_column: Text | None = Field(None, description="default: data.text_column")
    pattern: Text | None = Field(None, description="default: data.pattern")


class DataConfig(Section):
    """The text."""

    source: Text | Annotated[tuple[Text, ...], Lenient] | None = Field(
        None,
        description='text file, folder, .jsonl, .parquet, .gz, saved data set, a list of these; "stdlib": the Python '
        "library's sources; or X of prepared X.bin and X.idx",
    )
    blend: Annotated[tuple[BlendPart, ...], Lenient] | None = Field(
        None, description="in place of source: [[data.blend]] tables of source and weight"
    )
    validation: Text | Annotated[tuple[Text, ...], Lenient] | None = Field(
        None, description="text to validate on, likewise; or name split"
    )
    split: Annotated[tuple[float, ...], Lenient] | None = Field(
        None, description="shares of the documents for training, validation and test, [0.98, 0.01, 0.01]"
    )
    text_column: Text = Field("text", description="field of a .jsonl line, column of a table")
    pattern: Text = Field("*", description="files of a folder to read")
    min_length: int = Field(0, ge=0, lt=2**31, description="documents of less tokens are left out")
    document_mask: bool = Field(
        False, description="tokens attend within their own document only, and positions start anew with each"
    )
    shuffle: bool = Field(True, description="order of sequences anew in every epoch")
    workers: int = Field(2, ge=0, lt=1024, description="processes that encode text")
    loader_workers: int = Field(
        1, ge=0, lt=1024, description="threads that read later steps' batches; 0: each step reads its own"
    )
    prefetch: Count = Field(2, description="steps whose batches those threads keep ready")


class ValidationConfig(Section):
    """The loss on held-out text (data.validation or data.split), without dropout; after the last step in any case."""

    every: Count | None = Field(None, description="steps between validations; default: only after the last")
    at_start: bool = Field(False, description="validate before the first step too")
    samples: Count | None = Field(
        None, description="sequences of each set, always the same ones, drawn by run.seed; default: all"
    )
    patience: Count | None = Field(
        None, description="end the run after so many validations in a row without an improvement"
    )
    minimum_improvement: float = Field(
        0.0, ge=0, description="for patience: how much lower a loss has to be to be an improvement"
    )


class CheckpointConfig(Section):
    """When the run is saved and where it goes on; the last step is always saved."""

    every: Count | None = Field(None, description="steps between checkpoints; default: only the last")
    async_save: bool = Field(True, description="train on while a copy in memory is written, if there is room")
    best: bool = Field(False, description="also save at the lowest validation loss, for checkpoints/best")
    keep_last: Count | None = Field(
        None, description="delete all but so many of the last, the best, and what the run resumed from"
    )
    keep_every: Count | None = Field(None, description="with keep_last, also keep every so many steps")
    resume: Text = Field("auto", description='"auto": the latest of run.folder; "never"; or a checkpoint')
    export: bool | Literal["best"] = Field(
        True,
        description='write run.folder/export for Hugging Face at the end; "best": of the best checkpoint',
    )


class MonitorConfig(Section):
    """What is reported while training; metrics.jsonl has every step."""

    every: Count = Field(1, description="steps between console lines")
    tensorboard: bool = Field(False, description="also write run.folder/tensorboard (needs tensorboard)")
    peak_tflops: float | None = Field(
        None, gt=0, description="peak TFLOP/s of one device, for MFU; default: the card's data sheet"
    )


@dataclass(frozen=True)
class BatchPlan:
    """global_batch_size = micro_batch_size * micro_batches * data, in sequences."""

    micro_batch_size: int
    micro_batches: int
    global_batch_size: int
    data: int


class RunConfig(Section):
    """A whole run, as RUN.toml describes it. From `load_config` it is resolved: what follows is filled in."""

    run: RunSection = RunSection()
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    deepspeed: DeepSpeedSection | None = None
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()

    @property
    def layout(self) -> Layout:
        """The mesh of a resolved run."""
        return Layout(self.parallel.pipeline, self._data, self.parallel.tensor)

    @property
    def split(self) -> PipelineSplit:
        """How the layers of a resolved run are spread over its stages."""
        parallel = self.parallel
        assert parallel.virtual_stages != "auto", "not resolved"
        return pipeline_split(
            self.model.num_hidden_layers,
            parallel.pipeline,
            chunks_per_stage=parallel.virtual_stages,
            v_shaped=SCHEDULES[parallel.schedule].v_shaped,
            given=parallel.layers_per_stage,
        )

    @property
    def batch(self) -> BatchPlan:
        """The batch of a resolved run."""
        training = self.training
        assert training.micro_batch_size and training.micro_batches and training.global_batch_size, (
            "not resolved"
        )
        return BatchPlan(
            training.micro_batch_size, training.micro_batches, training.global_batch_size, self._data
        )

    @property
    def zero_stage(self) -> int:
        """0 where DeepSpeed is not used."""
        if self.deepspeed is None:
            return 0
        return int(self.deepspeed.passed_on.get("zero_optimization", {}).get("stage", 0))

    @property
    def native_optimizer(self) -> bool:
        return self.deepspeed is not None and self.deepspeed.native_optimizer

    def deepspeed_json(self) -> dict[str, Any]:
        """What DeepSpeed is handed: to it a step is one micro batch, and optimizer and learning rate are ours."""
        passed_on = dict(self.deepspeed.passed_on) if self.deepspeed is not None else {}
        for block in ("fp16", "bf16"):
            enabled = self.training.precision == block
            if block in passed_on or enabled:
                passed_on[block] = {**passed_on.get(block, {}), "enabled": enabled}
        if self.training.precision == "fp16":
            passed_on["fp16"] |= self._deepspeed_loss_scale
        return {
            **passed_on,
            "train_micro_batch_size_per_gpu": self.batch.micro_batch_size * self.batch.micro_batches,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.optimizer.gradient_clipping,
            # The optimizer is given by us: DeepSpeed would compile its own in every rank, for minutes.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    def in_precision(self, precision: str) -> "RunConfig":
        """The run with the precision that "auto" stands for on the machine."""
        training = self.training.model_copy(update={"precision": precision})
        return self.model_copy(update={"training": training})

    @property
    def _deepspeed_loss_scale(self) -> dict[str, Any]:
        """DeepSpeed's words for our loss scale; 0 is its word for a dynamic one."""
        training = self.training
        return {
            "loss_scale": 0 if training.loss_scale == "dynamic" else training.loss_scale,
            "initial_scale_power": training.initial_loss_scale_power,
            "loss_scale_window": training.loss_scale_window,
            "hysteresis": training.loss_scale_hysteresis,
            "min_loss_scale": training.minimum_loss_scale,
        }

    @property
    def _data(self) -> int:
        assert self.parallel.data != "auto", "not resolved"
        return self.parallel.data
