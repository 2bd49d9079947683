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
    **{
        PeerLayout(f"context 2, {length} tokens", context=2, sequences=1, length=length): (
            PICOTRON,
            Contender("megalite, ring", "ours", ours=True, context_method="ring"),
            Contender("megalite, gather", "ours", ours=True),
            Contender("megalite, ulysses", "ours", ours=True, context_method="ulysses"),
            Contender("megalite, one process", "ours", ours=True, alone=True),
        )
        for length in (2048, 4096)
    },
}

QUICK = {
    "one process": ("transformers", "megalite"),
    "data 2": ("torch DDP", "megalite"),
    "pipeline 2": ("torch Schedule1F1B", "megalite, 1f1b"),
}


def chosen(layouts: Sequence[str], *, quick: bool, picotron: bool) -> dict[PeerLayout, tuple[Contender, ...]]:
    """The cases of these layouts (none: all), without picotron where there is no folder of it.

    A layout without any peer is left out.
    """
    cases = {}
    for layout, contenders in CASES.items():
        if layout.name not in (layouts or (QUICK if quick else [layout.name])):
            continue
        if quick and layout.name in QUICK:
            contenders = tuple(each for each in contenders if each.name in QUICK[layout.name])
        left = tuple(each for each in contenders if picotron or each != PICOTRON)
        if not all(each.ours for each in left):
            cases[layout] = left
    return cases
