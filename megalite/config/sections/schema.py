"""Every setting of a run: its name, type, limits, default and the sentence that `--help` prints."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model

from megalite.config.sections.adapter_section import AdapterConfig, described_adapter
from megalite.config.sections.launch_section import LaunchSection
from megalite.config.sections.monitor_section import MonitorConfig
from megalite.config.sections.preference_section import PreferenceConfig
from megalite.config.sections.section import Count, Fraction, Lenient, Section, Text, one_of
from megalite.config.sections.shape_settings import model_shape, shape_settings
from megalite.config.sections.text_sections import DataConfig, TokenizerConfig, ValidationConfig
from megalite.config.sections.training_section import LEAST_MICRO_BATCH, BatchPlan, TrainingConfig
from megalite.families.registry import names_in_files
from megalite.launcher.control.connection import RendezvousLimits
from megalite.launcher.control.hang import HangPolicy
from megalite.topology.axes import Layout
from megalite.topology.context import ContextMethod
from megalite.topology.learning_rate import DECAYS
from megalite.topology.optimizers import OPTIMIZERS, optimizers_with
from megalite.topology.parameter_groups import ParameterGroup
from megalite.topology.schedules import SCHEDULES
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit, pipeline_split

# Settings that name a source of other settings; a resolved run has the values in their place.
STARTING_POINTS = {"model": ("preset", "hf_config"), "deepspeed": ("config",)}

DEEPSPEED_LOSS_SCALE = {
    "loss_scale": "loss_scale",
    "initial_scale_power": "initial_loss_scale_power",
    "loss_scale_window": "loss_scale_window",
    "hysteresis": "loss_scale_hysteresis",
    "min_loss_scale": "minimum_loss_scale",
}
"""Keys of fp16 in DeepSpeed's JSON -> settings of [training]."""


class RunSection(Section):
    """The run's folder and its random seed."""

    folder: Text = Field("runs/default", description="folder for everything the run writes")
    seed: int = Field(
        1234, ge=0, lt=2**63, description="random seed of initial weights, data order and dropout"
    )


class ModelComputeSettings(Section):
    """How the model computes: dropout, operators, memory of the loss."""

    embedding_dropout: Fraction = Field(0.0, description="dropout probability of the embedding's output")
    residual_dropout: Fraction = Field(
        0.0, description="dropout probability of each block's output before the residual sum"
    )
    mlp_dropout: Fraction = Field(0.0, description="dropout probability of the MLP's activations")
    attention_dropout: Fraction = Field(0.0, description="dropout probability of the attention probabilities")
    kernels: Literal["auto", "fused", "reference"] = Field(
        "auto",
        description='"fused": compiled operators, "reference": plain torch, "auto": compiled where built',
    )
    chunked_loss: int = Field(
        0, ge=0, lt=2**31, description="maximum number of tokens whose logits exist at once; 0: no limit"
    )


class _StartingPoint(Section):
    preset: Text | None = Field(
        None,
        description="named shape (megalite config presets); single keys of [model] override it",
    )
    hf_config: Text | None = Field(
        None,
        description="Hugging Face config.json, its folder, or org/name of the Hub, for the shape",
    )
    weights: Text | None = Field(
        None,
        description="Hugging Face folder, or org/name[@revision] of the Hub, for shape and weights",
    )


if TYPE_CHECKING:
    OptimizerName = str
    ScheduleName = str
    PipelineScheduleName = str

    class _ShapeSettings(_StartingPoint):
        def __getattr__(self, name: str) -> Any: ...
else:
    OptimizerName, PipelineScheduleName = one_of(OPTIMIZERS), one_of(SCHEDULES)
    ScheduleName = one_of((*DECAYS, "deepspeed"))
    _ShapeSettings = create_model("_ShapeSettings", __base__=_StartingPoint, **shape_settings())


def _readers(setting: str) -> str:
    """Return the optimizers that read a setting, as its description names them."""
    return ", ".join(record.name for record in optimizers_with(setting))


class ModelConfig(ModelComputeSettings, _ShapeSettings):
    """The model's shape, in the words of Hugging Face's config.json."""

    def shape(self, vocab_size: int) -> ModelShape:
        """Return the shape; `vocab_size` (the tokenizer's) counts where the setting is "auto"."""
        return model_shape(self, vocab_size)


class ParallelConfig(Section):
    """Tensor, context, pipeline and data parallelism; the product of the four sizes is the number of ranks.

    Expert parallelism takes ranks of a stage a second time.
    """

    tensor: Count = Field(1, description="tensor-parallel size: ranks that share each layer")
    sequence: bool = Field(
        False,
        description="sequence parallelism: split activations between blocks over the tensor ranks",
    )
    context: Count = Field(1, description="context-parallel size: ranks that share each sequence")
    context_method: Literal[ContextMethod, "auto"] = Field(
        "auto", description='attention over the tokens of other ranks; "auto": by heads and documents'
    )
    expert: Count = Field(
        1, description="expert-parallel size: ranks that divide a layer's experts, among those of a stage"
    )
    expert_tensor: Count | None = Field(
        None, description="ranks that share each expert, 1 or tensor; default: tensor"
    )
    pipeline: Count = Field(1, description="pipeline-parallel size: number of stages")
    data: Count | Literal["auto"] = Field(
        "auto",
        description='data-parallel size: replicas; "auto": started ranks / (tensor * context * pipeline)',
    )
    schedule: PipelineScheduleName = Field(
        "1f1b", description="pipeline schedule: the order of forwards and backwards"
    )
    virtual_stages: Count | Literal["auto"] = Field(
        "auto",
        description='model chunks per stage; "auto": 1 for '
        + " and ".join(name for name, schedule in SCHEDULES.items() if schedule.default_chunks == 1)
        + ", 2 for the others",
    )
    layers_per_stage: Annotated[tuple[Count, ...], Lenient] | Literal["auto"] | None = Field(
        None,
        description='layers of each chunk in order, as in [3, 5]; default: equal numbers; "auto": equal work',
    )


class ParameterGroupConfig(Section):
    """A group of parameters with its own learning rate and weight decay."""

    pattern: Text = Field(
        description="glob over the parameter names of the family's files, or Llama's; first match counts"
    )
    learning_rate_ratio: float = Field(1.0, ge=0, description="factor on the learning rate")
    weight_decay: float | None = Field(
        None, ge=0, description="weight decay of the group; default: optimizer.weight_decay"
    )

    def group(self, shape: ModelShape) -> ParameterGroup:
        """Return the group among the parameters of a shape."""
        return ParameterGroup(
            self.pattern, self.learning_rate_ratio, self.weight_decay, names_in_files(shape)
        )


class OptimizerConfig(Section):
    """The optimizer, gradient clipping and the learning-rate schedule."""

    name: OptimizerName = Field(
        "adamw",
        description="; ".join(
            ["optimizer", *(f"{record.name}: {record.note}" for record in OPTIMIZERS.values() if record.note)]
        ),
    )
    learning_rate: float = Field(3e-4, gt=0, description="peak learning rate")
    betas: Annotated[tuple[Fraction, Fraction], Lenient] = Field(
        (0.9, 0.95), description=f"{_readers('betas')}: decay rates of the first and second moment"
    )
    eps: float = Field(1e-8, gt=0, description=f"{_readers('eps')}: epsilon added to the denominator")
    weight_decay: float = Field(
        0.1, ge=0, description="weight decay, decoupled except for sgd; norms and biases have none"
    )
    gradient_clipping: float = Field(
        1.0, ge=0, description="clip gradients to this global L2 norm; 0: no clipping"
    )
    clip_value: float = Field(
        0.0,
        ge=0,
        description="clamp gradient elements to +- this value before the norm; 0: no clamping",
    )
    schedule: ScheduleName = Field(
        "cosine",
        description='learning-rate decay; "wsd": only at the end, "deepspeed": [deepspeed.scheduler]',
    )
    warmup_steps: int = Field(
        0, ge=0, lt=2**31, description='steps of warm-up, linear unless schedule is "deepspeed"'
    )
    warmup_ratio: Fraction = Field(
        0.0, description="warm-up as a fraction of the run's steps, rounded up; instead of warmup_steps"
    )
    minimum_ratio: float = Field(0.1, ge=0, le=1, description="final learning rate as a fraction of the peak")
    decay_steps: Count | None = Field(
        None, description="step at which the decay ends; default: the last step"
    )
    decay_fraction: float = Field(
        0.1, gt=0, le=1, description="wsd: fraction of decay_steps spent in the decay"
    )
    decay_shape: Literal["sqrt", "linear"] = Field("sqrt", description="wsd: decay by 1 - sqrt, or linearly")
    momentum: float | None = Field(
        None,
        ge=0,
        lt=1,
        description=f"{_readers('momentum')}: momentum; default: "
        + ", ".join(f"{record.momentum:g} for {record.name}" for record in optimizers_with("momentum")),
    )
    ema_decay: Fraction = Field(
        0.0,
        description="decay of an exponential moving average of the weights, saved too; 0: no average",
    )
    groups: Annotated[tuple[ParameterGroupConfig, ...], Lenient] = Field(
        (), description="[[optimizer.groups]] tables with pattern, learning_rate_ratio and weight_decay"
    )

    @property
    def momentum_or_default(self) -> float:
        """The momentum, of an optimizer that has one; 0 for others."""
        return OPTIMIZERS[self.name].momentum or 0.0 if self.momentum is None else self.momentum


def warmup_of(optimizer: Any, total_steps: int) -> int:
    """Return the steps of warm-up of a run; `optimizer` has the settings of [optimizer]."""
    # Rounded before, so that 0.1 of 30 steps is 3 and not 4.
    return int(optimizer.warmup_steps or ceil(round(optimizer.warmup_ratio * total_steps, 6)))


class DeepSpeedSection(Section):
    """DeepSpeed's configuration: a JSON file, or its keys as TOML ([deepspeed.zero_optimization])."""

    model_config = ConfigDict(extra="allow")

    config: Text | None = Field(
        None,
        description="DeepSpeed JSON file, relative to the working directory or to RUN.toml",
    )
    native_optimizer: bool = Field(
        False, description="use DeepSpeed's compiled AdamW under ZeRO instead of torch's"
    )

    @property
    def passed_on(self) -> Mapping[str, Any]:
        """The keys that DeepSpeed is handed unchanged."""
        return self.model_extra or {}


class CheckpointConfig(Section):
    """Saving, keeping and resuming checkpoints; the last step is always saved."""

    every: Count | Text | None = Field(
        None,
        description='steps between checkpoints, or epochs as in "0.5 epochs"; default: only the last step',
    )
    async_save: bool = Field(
        True, description="write checkpoints while training goes on, from a copy in host memory"
    )
    in_memory_every: Annotated[int, Field(ge=0)] = Field(
        0, description="steps between copies in the memory of the hosts, for restarts; 0: none"
    )
    best: bool = Field(
        False, description="keep the checkpoint of the lowest validation loss as checkpoints/best"
    )
    keep_last: Count | None = Field(
        None,
        description="keep only the last N checkpoints, the best and the resumed one; default: all",
    )
    keep_every: Count | None = Field(
        None, description="also keep checkpoints whose step is a multiple of N, with keep_last"
    )
    resume: Text = Field(
        "auto", description='checkpoint to resume: "auto" (the latest in run.folder), "never" or a path'
    )
    resume_changed: bool = Field(
        False, description="resume with other data, though samples may be repeated or left out"
    )
    export: bool | Literal["best"] = Field(
        True,
        description='export to run.folder/export at the end (Hugging Face); "best": the best checkpoint',
    )
    export_like: Text | None = Field(
        None,
        description="config.json whose extra keys exports copy; default: that of hf_config or weights",
    )


class RunConfig(Section):
    """A whole run, as RUN.toml describes it. `load_config` returns it resolved: derived settings are filled in."""

    run: RunSection = RunSection()
    model: ModelConfig
    adapter: AdapterConfig = AdapterConfig()
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    deepspeed: DeepSpeedSection | None = None
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig
    preference: PreferenceConfig = PreferenceConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    launch: LaunchSection = LaunchSection()

    def shape(self, tokenizer_size: int) -> ModelShape:
        """Return the model's shape with its adapter.

        It has a row for every id of a tokenizer that tokenizer.add_tokens enlarged.
        """
        shape = self.model.shape(tokenizer_size)
        rows = max(shape.vocab_size, tokenizer_size) if self.tokenizer.add_tokens else shape.vocab_size
        return replace(shape, vocab_size=rows, adapter=described_adapter(self.adapter))

    @property
    def layout(self) -> Layout:
        """Sizes of the mesh's axes; for a resolved run."""
        return Layout.of(self.parallel, self._data)

    @property
    def rendezvous_limits(self) -> RendezvousLimits:
        """The times for ranks to come and to answer, and what follows when none moves."""
        launch = self.launch
        return RendezvousLimits(launch.rendezvous_seconds, launch.heartbeat_seconds, self.hang_policy)

    @property
    def hang_policy(self) -> HangPolicy | None:
        """When the run counts as hanging, and what follows; None: nobody watches."""
        reaction = self.monitor.on_hang
        if reaction == "off":
            return None
        return HangPolicy(self.monitor.hang_seconds, reaction == "stop", self.launch.collective_seconds)

    @property
    def split(self) -> PipelineSplit:
        """Which layers each stage and chunk holds; for a resolved run."""
        parallel = self.parallel
        assert parallel.virtual_stages != "auto" and parallel.layers_per_stage != "auto", "not resolved"
        return pipeline_split(
            self.model.num_hidden_layers,
            parallel.pipeline,
            chunks_per_stage=parallel.virtual_stages,
            v_shaped=SCHEDULES[parallel.schedule].v_shaped,
            layers_per_chunk=parallel.layers_per_stage,
        )

    @property
    def batch(self) -> BatchPlan:
        """The sizes of the batch; for a resolved run. Until "auto" is chosen, the smallest micro batches."""
        training = self.training
        if training.micro_batch_size == "auto":
            assert training.global_batch_size, "not resolved"
            size = LEAST_MICRO_BATCH[self.data.kind]
            return BatchPlan.of_size(size, training.global_batch_size, self._data)
        assert training.micro_batch_size and training.micro_batches and training.global_batch_size, (
            "not resolved"
        )
        return BatchPlan(
            training.micro_batch_size, training.micro_batches, training.global_batch_size, self._data
        )

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's ZeRO stage; 0: DeepSpeed is not used."""
        if self.deepspeed is None:
            return 0
        return int(self.deepspeed.passed_on.get("zero_optimization", {}).get("stage", 0))

    @property
    def native_optimizer(self) -> bool:
        return self.deepspeed is not None and self.deepspeed.native_optimizer

    def deepspeed_json(self) -> dict[str, Any]:
        """The configuration that DeepSpeed is handed.

        megalite accumulates micro batches and owns optimizer and learning rate, so a step is one micro batch there.
        """
        passed_on = dict(self.deepspeed.passed_on) if self.deepspeed is not None else {}
        passed_on.pop("scheduler", None)
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
            # megalite passes its own optimizer: DeepSpeed would compile one in every rank, which takes minutes.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    @property
    def deepspeed_scheduler(self) -> tuple[str, Mapping[str, Any]]:
        """The type and the parameters of [deepspeed.scheduler]; for optimizer.schedule = "deepspeed"."""
        assert self.deepspeed is not None, "not resolved"
        table = self.deepspeed.passed_on["scheduler"]
        return table["type"], table["params"]

    def in_precision(self, precision: str) -> "RunConfig":
        """A copy of the run with `training.precision` set, for example to what "auto" resolves to."""
        training = self.training.model_copy(update={"precision": precision})
        return self.model_copy(update={"training": training})

    def resuming(self, checkpoint: str) -> "RunConfig":
        """A copy of the run with another `checkpoint.resume`."""
        return self.model_copy(
            update={"checkpoint": self.checkpoint.model_copy(update={"resume": checkpoint})}
        )

    def in_micro_batches(self, size: int) -> "RunConfig":
        """A copy of the run with micro batches of `size` sequences in the same global batch."""
        plan = BatchPlan.of_size(size, self.batch.global_batch_size, self._data)
        chosen = {"micro_batch_size": size, "micro_batches": plan.micro_batches, "memory_limit": None}
        return self.model_copy(update={"training": self.training.model_copy(update=chosen)})

    @property
    def _deepspeed_loss_scale(self) -> dict[str, Any]:
        """The loss scale under DeepSpeed's keys; there 0 means a dynamic scale."""
        scale = {theirs: getattr(self.training, ours) for theirs, ours in DEEPSPEED_LOSS_SCALE.items()}
        return scale | ({"loss_scale": 0} if self.training.loss_scale == "dynamic" else {})

    @property
    def _data(self) -> int:
        assert self.parallel.data != "auto", "not resolved"
        return self.parallel.data
