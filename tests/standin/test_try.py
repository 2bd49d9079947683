import pytest
from tests.support.ranks import RankPool
from tests.support.training import *
from tests.support.tiny import tiny_shape
from megalite.topology.layout import Layout
from tests.support.parity import *
@pytest.fixture(scope="module")
def devices():
    pool = RankPool("standin"); yield pool; pool.close()
CASES={"alone":dict(), "dp2":dict(layout=Layout(data=2)),"tp2":dict(layout=Layout(tensor=2)),"tp2sp":dict(layout=Layout(tensor=2),sequence_parallel=True),"pp2":dict(layout=Layout(pipeline=2)),
"zbv":dict(layout=Layout(pipeline=2),schedule="zbv",chunks_a_stage=2),"fused":dict(kernels="fused",dtype=torch.float32), "bf16":dict(dtype=torch.bfloat16), "docs":dict(documents=True)}
@pytest.mark.parametrize("case", CASES)
def test_it(ranks, devices, case):
    job = Job(tiny_shape(), steps=2, **CASES[case])
    a = ranks.run(train_on_rank, job.layout.world_size, job=job)
    b = devices.run(train_on_rank, job.layout.world_size, job=job)
    for x,y in zip(a,b):
        print(x.losses,y.losses,x.norms,y.norms)
        assert x.losses==y.losses and x.norms==y.norms
        for k in ("initial","gradients","final"):
            for s,t in zip(getattr(x,k),getattr(y,k),strict=True):
                assert torch.equal(s.values,t.values),(k,s.name,(s.values-t.values).abs().max())
