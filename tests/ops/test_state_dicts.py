"""State dicts that everybody can read: those of torch's own modules, safetensors, torch.load, torch.distributed.checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import opfuse
from opfuse import ops
from opfuse.errors import OpfuseWarning
from opfuse.recipes import DelayedScaling, Float8CurrentScaling
from opfuse.tensors.masters import stored_in

DELAYED = DelayedScaling(amax_history_len=4)


def mlp() -> ops.Sequential:
    return ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Quantize(), ops.Linear(64, 32, bias=False))


def step(model: nn.Module, recipe: opfuse.Recipe | None) -> torch.Tensor:
    torch.manual_seed(1)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(torch.randn(32, 32, requires_grad=True))
    y.square().sum().backward()
    return y


def trained(recipe: opfuse.Recipe | None = DELAYED, make=mlp) -> ops.Sequential:
    model = make()
    for _ in range(2):
        step(model, recipe)
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


RECIPES = {"none": None, "current": Float8CurrentScaling(), "delayed": DELAYED}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)

# -- torch's own modules -----------------------------------------------------------------------------------------------------

PAIRS = {
    "Linear": lambda m: m.Linear(8, 16),
    "Linear without bias": lambda m: m.Linear(8, 16, bias=False),
    "LayerNorm": lambda m: m.LayerNorm(8),
    "LayerNorm of a matrix": lambda m: m.LayerNorm((4, 8)),
    "RMSNorm": lambda m: m.RMSNorm(8),
    "GELU": lambda m: m.GELU(),
    "Sequential": lambda m: m.Sequential(
        m.LayerNorm(8), m.Linear(8, 16), m.ReLU(), m.Dropout(0.1), m.Sequential(m.Linear(16, 8, bias=False), m.RMSNorm(8))
    ),
}


@pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_the_state_dict_is_that_of_the_counterpart_in_torch_nn(make, assign):
    mine, theirs = make(ops), make(nn)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    mine.load_state_dict(theirs.state_dict(), assign=assign)
    assert same(mine, theirs)
    back = make(nn)
    back.load_state_dict(mine.state_dict(), assign=assign)
    assert same(back, theirs)


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["none", "current"])
def test_what_runs_without_states_saves_none(recipe):
    model = trained(recipe)
    step(model, recipe)
    theirs = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Identity(), nn.Linear(64, 32, bias=False))
    theirs.load_state_dict(model.state_dict())
    assert same(theirs, model)


def test_a_plain_state_dict_leaves_the_states_of_an_op_alone():
    model = trained()
    plain = {name: value for name, value in model.state_dict().items() if "delayed_scaling" not in name}
    before = copy.deepcopy(model.state_dict())
    model.load_state_dict(plain)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_states_go_to_no_op_that_casts_nothing():
    state = trained(make=lambda: ops.Sequential(ops.Linear(32, 32))).state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.delayed_scaling\.input\.scale"):
        ops.Sequential(ops.LayerNorm(32)).load_state_dict(state)


class Halved(ops.BasicOperation):
    """x / 2, cast; of one's own, with slots that it asks for itself."""

    def num_quantizers(self, mode):
        return 1 if mode == "forward" else 0

    def op_forward(self, ctx, input_, **_):
        quantizer = self.get_quantizer("forward", 0)
        return (input_ if quantizer is None else quantizer(input_).dequantize()) / 2

    def op_backward(self, ctx, grad_output):
        return grad_output / 2, ()


def test_states_of_an_op_of_ones_own_are_saved_too():
    model = trained(make=lambda: ops.Sequential(Halved(), nn.Identity()))
    assert model[0].delayed_scaling.input.scale != 1
    other = ops.Sequential(Halved(), nn.Identity())
    other.load_state_dict(model.state_dict())
    assert same(model, other)
    assert torch.equal(step(other, DELAYED), step(model, DELAYED))


# -- files -------------------------------------------------------------------------------------------------------------------


def model_files(model, fresh, path):
    import safetensors.torch as st  # with libraries that only the tests of a CPU need

    st.save_model(model, str(path / "model.safetensors"))
    assert st.load_model(fresh, str(path / "model.safetensors")) == (set(), [])


def files(model, fresh, path):
    import safetensors.torch as st

    st.save_file(model.state_dict(), path / "model.safetensors", metadata={"format": "pt"})
    fresh.load_state_dict(st.load_file(path / "model.safetensors"))


def shards_on_meta(model, fresh, path):
    """As libraries of pretrained models do: two files, and a model on the meta device that takes over their tensors."""
    import safetensors.torch as st

    state = model.state_dict()
    for i in range(2):
        part = {name: value.clone() for j, (name, value) in enumerate(state.items()) if j % 2 == i}
        st.save_file(part, path / f"{i}.safetensors", metadata={"format": "pt"})
    loaded = {name: value for i in range(2) for name, value in st.load_file(path / f"{i}.safetensors").items()}
    fresh.to("meta")
    fresh.load_state_dict(loaded, assign=True)
    for parameter in fresh.parameters():
        parameter.requires_grad_()


def weights_only(model, fresh, path):
    torch.save(model.state_dict(), path / "model.pt")
    fresh.load_state_dict(torch.load(path / "model.pt", weights_only=True))


def mapped(model, fresh, path):
    torch.save(model.state_dict(), path / "model.pt")
    fresh.load_state_dict(torch.load(path / "model.pt", weights_only=True, mmap=True, map_location="cpu"))


FILES = [model_files, files, shards_on_meta, weights_only, mapped]


@pytest.mark.few
@pytest.mark.cpu
@pytest.mark.row("H28")
@every_recipe
@pytest.mark.parametrize("through", FILES)
def test_a_model_goes_through_a_file(through, recipe, tmp_path):
    model, fresh = trained(recipe), mlp()
    through(model, fresh, tmp_path)
    assert same(model, fresh)
    assert torch.equal(step(fresh, recipe), step(model, recipe))


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------------


def plain_dictionaries(model, fresh, path):
    dcp.save(model.state_dict(), checkpoint_id=path)
    held = fresh.state_dict()
    dcp.load(held, checkpoint_id=path)
    fresh.load_state_dict(held)


def model_dictionaries(model, fresh, path):
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    held = {"model": get_model_state_dict(fresh)}
    dcp.load(held, checkpoint_id=path)
    set_model_state_dict(fresh, held["model"])


def modules(model, fresh, path):
    dcp.save({"model": model}, checkpoint_id=path)
    dcp.load({"model": fresh}, checkpoint_id=path)


@pytest.mark.few
@pytest.mark.cpu
@pytest.mark.row("H28")
@every_recipe
@pytest.mark.parametrize("through", [plain_dictionaries, model_dictionaries, modules])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_goes_through_a_distributed_checkpoint(through, recipe, tmp_path):
    model, fresh = trained(recipe), mlp()
    if recipe is DELAYED:
        opfuse.prepare_delayed(fresh, recipe)
    through(model, fresh, tmp_path)
    assert same(model, fresh)
    assert torch.equal(step(fresh, recipe), step(model, recipe))


@pytest.mark.cpu
@pytest.mark.parametrize("through", [plain_dictionaries, model_dictionaries, modules])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_that_a_checkpoint_was_not_asked_for_are_missed_aloud(through, tmp_path):
    model, fresh = trained(), mlp()
    through(model, fresh, tmp_path)
    with pytest.warns(OpfuseWarning, match=r"without the keys of states.*opfuse\.prepare_delayed\(model, recipe\) before"):
        step(fresh, DELAYED)
    step(fresh, DELAYED)
    fresh.load_state_dict(fresh.state_dict())
    step(fresh, DELAYED)


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_that_is_read_into_the_models_own_tensors_is_missed_aloud_too(tmp_path):
    """``dcp.load(model.state_dict())`` fills parameters in place, and nobody loads the dictionary."""
    dcp.save(trained().state_dict(), checkpoint_id=tmp_path)
    fresh, looked_at = mlp(), mlp()
    dcp.load(fresh.state_dict(), checkpoint_id=tmp_path)
    with pytest.warns(OpfuseWarning, match=r"without the keys of states.*opfuse\.prepare_delayed\(model, recipe\) before"):
        step(fresh, DELAYED)
    looked_at.state_dict()
    looked_at.load_state_dict(mlp().state_dict())
    step(looked_at, DELAYED)
    used = mlp()
    step(used, None)
    used.state_dict()
    torch.optim.SGD(used.parameters(), lr=1.0).step()
    step(used, DELAYED)


@pytest.mark.few
@pytest.mark.cpu
@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("through", [plain_dictionaries, model_dictionaries])
def test_states_that_no_sharded_model_asked_for_are_missed_aloud(through, is_converted, tmp_path):
    """A shard in a state dict counts its writes by itself."""

    def sharded() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) if is_converted else mlp()
        if is_converted:
            opfuse.fuse_(model, DELAYED)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with torch.no_grad():
            for parameter in model.parameters():
                stored_in(parameter).mul_(1)  # a write of its own, as an initialization makes it
        return model

    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        model, fresh, own = sharded(), sharded(), sharded()
        step(model, DELAYED)
        through(model, fresh, tmp_path / "kept")
        with pytest.warns(OpfuseWarning, match="without the keys of states"):
            step(fresh, DELAYED)
        own.load_state_dict(own.state_dict())
        step(own, DELAYED)
    finally:
        dist.destroy_process_group()


def test_names_of_buffers_are_names_in_their_module():
    model = trained()
    assert not [name for module in model.modules() for name, _ in module.named_buffers(recurse=False)]


@pytest.mark.cpu
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_states_go_through_ddp(full, tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full)
        model = trained(make=lambda: nn.parallel.DistributedDataParallel(mlp()))
        fresh = nn.parallel.DistributedDataParallel(opfuse.prepare_delayed(mlp(), DELAYED))
        assert not [name for name, _ in model.named_buffers()]
        state = {name: value.clone() for name, value in get_model_state_dict(model, options=options).items()}
        assert not any(name.startswith("module.") for name in state)
        set_model_state_dict(fresh, state, options=options)
        assert same(model, fresh)
    finally:
        dist.destroy_process_group()
