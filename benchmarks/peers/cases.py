"""The layouts, and who trains in each."""

from collections.abc import Sequence

from benchmarks.peers.contender import Contender, PeerLayout

OURS = Contender("megalite", "ours", ours=True)
PICOTRON = Contender("picotron", "picotron")
DEEPSPEED = Contender("DeepSpeed", "deepspeed_zero")

CASES: dict[PeerLayout, tuple[Contender, ...]] = {
    PeerLayout("one process"): (Contender("transformers", "plain_transformers"), OURS),
    PeerLayout("data 2", data=2, checkpoints=True): (
        Contender("torch DDP", "torch_ddp"),
        Contender("torch FSDP2", "torch_fsdp2"),
        PICOTRON,
        OURS,
    ),
    **{
        PeerLayout(f"data 2, ZeRO {stage}", data=2, zero=stage, checkpoints=True): (DEEPSPEED, OURS)
        for stage in (1, 2, 3)
    },
    PeerLayout("tensor 2", tensor=2): (
        Contender("torch parallelize_module", "torch_tensor"),
        PICOTRON,
        OURS,
    ),
    PeerLayout("pipeline 2", pipeline=2): (
        Contender("torch Schedule1F1B", "torch_pipeline"),
        Contender("DeepSpeed PipelineEngine", "deepspeed_pipeline"),
        PICOTRON,
        Contender("megalite, 1f1b", "ours", ours=True),
        Contender("megalite, 1f1b, layers_per_stage auto", "ours", ours=True, balanced=True),
        Contender("megalite, zbv", "ours", ours=True, schedule="zbv"),
    ),
}

QUICK = {
    "one process": ("transformers", "megalite"),
    "data 2": ("torch DDP", "megalite"),
    "pipeline 2": ("torch Schedule1F1B", "megalite, 1f1b"),
}


def chosen(layouts: Sequence[str], *, quick: bool, picotron: bool) -> dict[PeerLayout, tuple[Contender, ...]]:
    """The cases of these layouts (none: all), without picotron where there is no folder of it."""
    cases = {}
    for layout, contenders in CASES.items():
        if layout.name not in (layouts or (QUICK if quick else [layout.name])):
            continue
        if quick and layout.name in QUICK:
            contenders = tuple(each for each in contenders if each.name in QUICK[layout.name])
        cases[layout] = tuple(each for each in contenders if picotron or each != PICOTRON)
    return cases
