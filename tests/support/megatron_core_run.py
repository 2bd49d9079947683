"""Runs of megatron-core on the CPU: steps of Adam, a checkpoint of them, and two steps more.

    python -m tests.support.megatron_core_run FOLDER JOBS

JOBS are a JSON object of names and `CoreJob`s; their ranks are forked from one process, which has imported
megatron-core. Writes NAME/iter_0000003 as Megatron-LM does, and beside it what a reader must find: `truth-TP-PP-DP.pt`
(each rank's own masters and moments by name) and `next.pt` (loss and gradient norm of both steps after the checkpoint).
It calls megatron-core's own DistributedDataParallel, optimizers, schedules and dist_checkpointing; only what stands in
for CUDA (`_without_cuda`) and the dict that Megatron-LM's training loop puts around these states is made here.
"""

import json
import multiprocessing
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from tests.support.megatron_core_model import PADDED, SHAPES, build
from tests.support.megatron_writer import Written, arguments_of

STEPS, SEQUENCES, LENGTH = 3, 4, 12
ADAM = {"lr": 1e-2, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-7, "weight_decay": 0.1}
CLIP = 1.0
SECONDS = 120


@dataclass(frozen=True)
class CoreJob:
    """A run: model of SHAPES, layout, number type, optimizer, and the form of its checkpoint.

    sharding: of the distributed optimizer; None: the plain one. layers_apart: a key a layer, not one stacked tensor.
    """

    kind: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    dtype: str = "bfloat16"
    sharding: str | None = None
    form: str = "torch_dist"
    layers_apart: bool = False
    bucket_size: int | None = None

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data


def as_json(jobs: dict[str, CoreJob]) -> str:
    return json.dumps({name: asdict(job) for name, job in jobs.items()})


def tokens(step: int) -> Tensor:
    """The sequences of a step, one token longer than the model sees at once."""
    return torch.randint(101, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(100 + step))


def main(folder: Path, jobs: dict[str, CoreJob]) -> int:
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401

    context = multiprocessing.get_context("fork")
    failed = 0
    for name, job in jobs.items():
        (folder / name).mkdir(parents=True)
        ranks = [context.Process(target=_rank, args=(folder / name, job, rank)) for rank in range(job.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(SECONDS)
            process.kill()
            process.join()
            failed += process.exitcode != 0
    return int(failed > 0)


def _rank(folder: Path, job: CoreJob, rank: int) -> None:
    store = distributed.FileStore(str(folder / "meeting"), job.ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks)
    torch.set_num_threads(1)
    with _without_cuda():
        _train_and_save(folder, job)
    distributed.barrier()


def _without_cuda() -> Any:
    """Let the calls of CUDA that megatron-core makes on every path mean the CPU."""
    make = {name: getattr(torch, name) for name in ("tensor", "zeros", "empty", "full", "ones")}

    def on_cpu(create: Any, *arguments: Any, **options: Any) -> Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        made: Tensor = create(*arguments, **options)
        return made

    replaced = {name: partial(on_cpu, create) for name, create in make.items()}
    stack = mock.patch.multiple(torch, **replaced)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment,misc]
    for name in ("FloatTensor", "IntTensor", "LongTensor", "DoubleTensor", "ByteTensor"):
        setattr(torch.cuda, name, getattr(torch, name))
    torch.cuda.synchronize = lambda *_: None
    kind = torch.Tensor.type
    # The plain optimizer asks for its parameters' type by name.
    torch.Tensor.type = lambda self, *a, **b: (  # type: ignore[method-assign,assignment,misc]
        kind(self, *a, **b) if a or b else kind(self).replace("torch.", "torch.cuda.", 1)
    )
    return stack


def _train_and_save(folder: Path, job: CoreJob) -> None:
    model, arguments = _model(job)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    wrapped = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=job.sharding is not None,
            overlap_grad_reduce=job.bucket_size is not None,
            bucket_size=job.bucket_size,
        ),
        model,
        disable_bucketing=job.bucket_size is None,
    )
    config = OptimizerConfig(
        optimizer="adam",
        bf16=job.dtype == "bfloat16",
        fp16=job.dtype == "float16",
        initial_loss_scale=2.0**8,
        params_dtype=getattr(torch, job.dtype),
        use_distributed_optimizer=job.sharding is not None,
        clip_grad=CLIP,
        min_lr=0.0,
        **ADAM,
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    steps = STEPS * SEQUENCES
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=ADAM["lr"],
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=steps,
        lr_decay_style="constant",
        start_wd=ADAM["weight_decay"],
        end_wd=ADAM["weight_decay"],
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
    for step in range(STEPS):
        _step(wrapped, optimizer, step)
        scheduler.step(SEQUENCES)
    # The model's names in a checkpoint are those within all wrappers.
    bare = model.module if job.dtype != "float32" else model
    _save(folder, job, bare, optimizer, {"args": arguments, "opt_param_scheduler": scheduler.state_dict()})
    _save_truth(folder, job, bare, optimizer)
    after = [_step(wrapped, optimizer, STEPS + more) for more in range(2)]
    if distributed.get_rank() == job.ranks - 1:
        torch.save(after, folder / "next.pt")


def _save_truth(folder: Path, job: CoreJob, model: torch.nn.Module, optimizer: Any) -> None:
    """Save each parameter's masters and moments as this rank has them, and the part of it that these are of."""
    from megatron.core import parallel_state

    [inner] = optimizer.chained_optimizers
    truth: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if job.sharding is None:
            master = getattr(parameter, "main_param", parameter)
            state, part = {"param": master, **inner.optimizer.state[master]}, None
        elif parameter not in inner.model_param_gbuf_map:
            continue
        else:
            try:
                span = inner._get_model_param_range_map(parameter)["param"]
            except KeyError:  # all of it is on other data-parallel ranks
                continue
            state, part = inner._get_main_param_and_optimizer_states(parameter), (span.start, span.end)
        kept = {key: state[key].detach().flatten().clone() for key in ("param", "exp_avg", "exp_avg_sq")}
        truth[name] = {"shape": tuple(parameter.shape), "part": part, **kept}
    ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    torch.save(truth, folder / f"truth-{'-'.join(map(str, ranks))}.pt")
    if job.ranks == 1:
        ids = tokens(0)[:, :-1]
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        with torch.no_grad():
            torch.save(model(ids, torch.arange(LENGTH).repeat(len(ids), 1), later), folder / "logits.pt")


def _model(job: CoreJob) -> tuple[torch.nn.Module, Namespace]:
    shape, how = SHAPES[job.kind], Written(job.tensor, job.pipeline, padded=PADDED)
    dtype = getattr(torch, job.dtype)
    arguments = arguments_of(
        shape,
        how,
        **{**ADAM, "clip_grad": CLIP, "min_lr": 0.0, "lr_decay_style": "constant", "optimizer": "adam"},
        consumed_train_samples=STEPS * SEQUENCES,
        use_distributed_optimizer=job.sharding is not None,
        params_dtype=dtype,
        bf16=job.dtype == "bfloat16",
        fp16=job.dtype == "float16",
        global_batch_size=SEQUENCES,
        seq_length=LENGTH,
        world_size=job.ranks,
        ckpt_format=job.form,
        overlap_grad_reduce=job.bucket_size is not None,
        ddp_bucket_size=job.bucket_size,
        transformer_impl="local",
    )
    model = build(
        shape,
        arguments,
        job.tensor,
        pipeline=job.pipeline,
        parallel_output=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=job.dtype == "bfloat16",
        fp16=job.dtype == "float16",
    )
    if dtype != torch.float32:
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(model.config, model)
    return model.train(), arguments


def _step(model: torch.nn.Module, optimizer: Any, step: int) -> tuple[float, float]:
    """Train on a step's sequences, a micro batch each; return the mean loss and the gradient norm before clipping."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    rows = iter(tokens(step)[rank * SEQUENCES // ranks : (rank + 1) * SEQUENCES // ranks])

    def forward(data: Iterator[Tensor], module: torch.nn.Module) -> tuple[Tensor, Any]:
        row = next(data)[None]
        ids, labels = row[:, :-1], row[:, 1:]
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        output = module(ids, torch.arange(LENGTH)[None], later, labels=labels)
        return output, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

    model.zero_grad_buffer()
    optimizer.zero_grad()
    config = model.module.config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    seen = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=rows,
        model=[model],
        num_microbatches=SEQUENCES // ranks,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    updated, norm, _ = optimizer.step()
    assert updated
    loss = torch.stack([part["loss"] for part in seen]).mean() if seen else torch.zeros(())
    if seen:
        distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    return float(loss) / ranks, float(norm)


def _save(folder: Path, job: CoreJob, model: torch.nn.Module, optimizer: Any, around: dict[str, Any]) -> None:
    path = folder / f"iter_{STEPS:07d}"
    state = {
        "checkpoint_version": 3.0,
        "iteration": STEPS,
        "num_floating_point_operations_so_far": 0,
        **around,
    }
    if job.form == "torch":
        _save_torch(path, job, state, model, optimizer)
    else:
        from megatron.core import dist_checkpointing

        metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if job.layers_apart:
            metadata["non_homogeneous_layers"] = True
        if job.sharding is not None:
            metadata["distrib_optim_sharding_type"] = job.sharding
        state["model"] = model.sharded_state_dict(metadata=metadata)
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
        if distributed.get_rank() == 0:
            path.mkdir()
        distributed.barrier()
        dist_checkpointing.save(state, str(path), ("torch_dist", 1), content_metadata=metadata)
    if distributed.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(STEPS))


def _save_torch(
    path: Path, job: CoreJob, state: dict[str, Any], model: torch.nn.Module, optimizer: Any
) -> None:
    from megatron.core import parallel_state

    how = Written(job.tensor, job.pipeline)
    tp, pp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    rank = path / how.folder_of(tp, pp)
    first = parallel_state.get_data_parallel_rank() == 0
    if first:
        rank.mkdir(parents=True)
    distributed.barrier()
    if job.sharding is not None:
        optimizer.save_parameter_state(str(rank / "distrib_optim.pt"))
    if first:
        state["model"] = model.state_dict_for_save_checkpoint()
        state["optimizer"] = optimizer.state_dict()
        torch.save(state, rank / "model_optim_rng.pt")


if __name__ == "__main__":
    asked = {name: CoreJob(**job) for name, job in json.loads(sys.argv[2]).items()}
    sys.exit(main(Path(sys.argv[1]), asked))
