"""The loss of causal language models without their logits: that of the model, with all gradients, or a typed error."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.loss import loss_utils

import opfuse
from opfuse import recipes
from opfuse.errors import ConversionError
from tests.convert.test_changed import replica, shallow
from tests.convert.tiny import WORDS, small
from tests.turns import in_turn

MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaForCausalLM", "LlamaConfig", {}),
    ("Qwen3ForCausalLM", "Qwen3Config", {}),
    ("Gemma2ForCausalLM", "Gemma2Config", {"final_logit_softcapping": 0.5}),
    ("Gemma3ForCausalLM", "Gemma3TextConfig", {"final_logit_softcapping": 0.5}),
    ("Gemma3ForCausalLM", "Gemma3TextConfig", {}),
    ("GPT2LMHeadModel", "GPT2Config", {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}),
    ("MixtralForCausalLM", "MixtralConfig", {"output_router_logits": True}),  # which adds to the loss
]
NUMBERED = {f"{each[0]}-{i}": each for i, each in enumerate(MODELS)}


def tiny(name, config, *, tied=True, **fields):
    torch.manual_seed(0)
    made = small(getattr(transformers, config))
    for field, value in {"tie_word_embeddings": tied, **fields}.items():
        setattr(made, field, value)
    return getattr(transformers, name)(made)


def llama(**fields):
    return tiny("LlamaForCausalLM", "LlamaConfig", **fields)


def batch():
    ids = torch.randint(3, WORDS, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def agree(one, other, given, *, tolerance=2e-5):
    """Loss and every gradient, each relative to its norm."""
    found = []
    for model in (one, other):
        model.zero_grad()
        loss = model(**given).loss
        (loss * 3).backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for got, want in zip(*found, strict=True):
        assert (got is None) == (want is None)
        assert want is None or (got - want).norm() <= tolerance * want.norm() + 1e-9


@pytest.mark.parametrize(("number", "tied"), in_turn(NUMBERED, [True, False], of=2))
def test_loss_and_gradients_are_those_of_the_model(number, tied):
    name, config, fields = NUMBERED[number]
    plain = tiny(name, config, tied=tied, **fields)
    model = copy.deepcopy(plain)
    told = opfuse.fuse_(model, loss="fused")
    assert told[""].became.startswith("LinearCrossEntropy")
    assert [*model.state_dict()] == [*plain.state_dict()]
    given = batch()
    shifted = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    nines = given["labels"].masked_fill(given["labels"] == -100, 9)
    more = {}, {"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 7}, {"shift_labels": shifted}
    more = *more, {"labels": nines, "ignore_index": 9}
    for each in more:
        agree(model, plain, {**given, **each})
    assert model(**given).logits is None
    assert torch.equal(model(given["input_ids"]).logits, plain(given["input_ids"]).logits)
    opfuse.unfuse_(model)
    assert torch.equal(model(**given).loss, plain(**given).loss)
    assert not [path for path, part in model.named_modules() if "forward" in vars(part)]
    assert "_loss_function" not in vars(model)


def test_a_recipe_holds_for_the_layers_beside_it():
    plain = llama()
    model, other = copy.deepcopy(plain), copy.deepcopy(plain)
    opfuse.fuse_(model, recipes.Float8CurrentScaling(), loss="fused")
    opfuse.fuse_(other, recipes.Float8CurrentScaling())
    agree(model, other, batch(), tolerance=2e-2)  # the last bits of the loss's gradient move casts
    assert torch.allclose(model(**batch()).loss, other(**batch()).loss, rtol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_the_policy_converts_multiplies_quantized_in_its_loss(tied):
    """As an op that is built by hand does; calls without labels run the head's own forward."""
    recipe, other, given = recipes.Float8CurrentScaling(), recipes.Float8BlockScaling(), batch()
    model = llama(tied=tied)
    plain = model(input_ids=given["input_ids"]).logits
    told = opfuse.fuse_(model, recipe, policy={"lm_head": "default"}, loss="fused")
    assert (told[""].recipe, told["lm_head"].status) == ("Float8CurrentScaling", "kept")
    assert "its products are those of the fused loss" in told["lm_head"].why
    op = opfuse.ops.LinearCrossEntropy(model.config.hidden_size, WORDS, quantized=True)
    op.weight = model.lm_head.weight
    shifted = nn.functional.pad(given["labels"], (0, 1), value=-100)[..., 1:].reshape(-1)
    losses = []
    for region in (recipe, other, None):
        with nullcontext() if region is recipe else opfuse.autocast(recipe=region, enabled=region is not None):
            loss = model(**given).loss
            hidden = model.model(input_ids=given["input_ids"]).last_hidden_state.flatten(0, 1)
        with opfuse.autocast(recipe=region, enabled=region is not None):
            wanted = op(hidden, shifted)
        assert torch.equal(loss, wanted)
        for one, two in zip(
            *(torch.autograd.grad(each, (op.weight, *model.model.layers.parameters())) for each in (loss, wanted))
        ):
            assert torch.equal(one, two)
        losses.append(loss.item())
    assert len({*losses}) == len(losses)
    with opfuse.autocast(enabled=False):
        assert torch.equal(model(input_ids=given["input_ids"]).logits, plain)
    opfuse.unfuse_(model)
    assert torch.equal(model(input_ids=given["input_ids"]).logits, plain)


def test_a_head_without_a_policy_multiplies_in_high_precision_inside_a_region():
    model, given = llama(), batch()
    opfuse.fuse_(model, recipes.Float8CurrentScaling(), loss="fused")
    shifted = nn.functional.pad(given["labels"], (0, 1), value=-100)[..., 1:].reshape(-1)
    with opfuse.autocast(recipe=recipes.Float8BlockScaling()):
        loss = model(**given).loss
        hidden = model.model(input_ids=given["input_ids"]).last_hidden_state.flatten(0, 1)
    op = opfuse.ops.LinearCrossEntropy(model.config.hidden_size, WORDS)
    op.weight = model.lm_head.weight
    assert torch.equal(loss, op(hidden, shifted))


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_any_number_of_tokens_trains_with_a_quantized_head(kind):
    """17 of them, which fill no block. What they give is what they give with words behind them that nobody predicts."""
    recipe = {"mxfp8": recipes.MXFP8BlockScaling(), "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)}[kind]
    model = llama(tied=False).bfloat16()
    told = opfuse.fuse_(model, recipe, policy={"lm_head": "default"}, loss="fused")
    assert told[""].recipe == type(recipe).__name__
    ids = torch.randint(3, WORDS, (1, 17), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    (gradient,) = torch.autograd.grad(loss, model.lm_head.weight)
    more = nn.functional.pad(ids, (0, 15))
    behind = model(input_ids=more, labels=more.masked_fill(torch.arange(32) >= 17, -100)).loss
    assert loss.isfinite()
    assert torch.allclose(loss, behind, rtol=1e-2)
    (wanted,) = torch.autograd.grad(behind, model.lm_head.weight)
    assert (gradient - wanted).norm() < 0.2 * wanted.norm()


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (recipes.NVFP4BlockScaling(), "draws no random numbers"),
        (recipes.DelayedScaling(batch_invariant=True), "cast row by row"),
    ],
    ids=["nvfp4", "delayed"],
)
def test_a_recipe_that_cannot_cast_chunks_leaves_the_head_in_high_precision_and_says_so(recipe, why):
    model = llama(tied=False).bfloat16()
    told = opfuse.fuse_(model, recipe, policy={"lm_head": "default"}, loss="fused")
    assert (told["lm_head"].status, told[""].recipe) == ("refused", "")
    assert why in told["lm_head"].why
    model(**batch()).loss.backward()


def test_outputs_without_logits():
    model = llama()
    plain = copy.deepcopy(model)
    opfuse.fuse_(model, loss="fused")
    given = batch()
    loss, *rest = model(**given, return_dict=False)
    wanted, _, *others = plain(**given, return_dict=False)
    assert torch.allclose(loss, wanted)
    assert len(rest) == len(others)
    found = model(**given, output_hidden_states=True)
    assert "logits" not in found
    assert len(found.hidden_states) == len(plain(**given, output_hidden_states=True).hidden_states)
    given["labels"] = given["labels"][:, -4:]
    agree(model, plain, {**given, "logits_to_keep": 4})
    assert torch.equal(model.generate(given["input_ids"], max_new_tokens=3), plain.generate(given["input_ids"], max_new_tokens=3))


def test_copies_and_pickles_compute_with_their_own_parameters():
    model = llama()
    opfuse.fuse_(model, loss="fused")
    wanted = model(**batch()).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**batch()).loss, wanted)
        with torch.no_grad():
            other.lm_head.weight.zero_()
        assert not torch.equal(other(**batch()).loss, wanted)
        assert other(**batch()).logits is None
    assert torch.equal(model(**batch()).loss, wanted)


@pytest.mark.filterwarnings("ignore:.*shallow copy:opfuse.errors.OpfuseWarning")
@pytest.mark.parametrize("copied", [replica, shallow])
def test_shallow_copies_compute_with_their_own_parameters(copied):
    """Of the model, as DataParallel makes one for each device, and of its head alone."""
    plain = llama(tied=False)
    model = copy.deepcopy(plain)
    opfuse.fuse_(model, loss="fused")
    wanted, found = copied(plain)(**batch()), copied(model)(**batch())
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.loss, wanted.loss)
    hidden = torch.randn(2, plain.lm_head.in_features)
    assert torch.equal(copied(model.lm_head)(hidden), copied(plain.lm_head)(hidden))
    assert torch.equal(copy.copy(model.lm_head).forward(hidden), plain.lm_head(hidden))
    assert model(**batch()).logits is None


def test_threads_have_calls_of_their_own():
    model = llama()
    opfuse.fuse_(model, loss="fused")
    given = batch()
    wanted, logits = model(**given).loss, model(given["input_ids"]).logits
    failed = []

    def run(labels):
        for _ in range(5):
            found = model(**given) if labels else model(given["input_ids"])
            same = torch.equal(found.loss, wanted) if labels else torch.equal(found.logits, logits)
            failed.extend([] if same else [labels])

    threads = [threading.Thread(target=run, args=(bool(i % 2),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_converted_again_it_has_what_is_asked_for_last():
    model = llama()
    opfuse.fuse_(model, loss="fused")
    opfuse.fuse_(model, loss="fused")
    assert model(**batch()).logits is None
    with pytest.raises(ConversionError, match="match a module"):
        opfuse.fuse_(model, policy={"nowhere": None})
    assert model(**batch()).logits is None
    opfuse.fuse_(model)
    assert model(**batch()).logits is not None


def changed_head(model):
    model.lm_head = nn.Sequential(model.lm_head)


def own_loss(model):
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()


def wrapped_loss(model):
    own = model.loss_function
    model.loss_function = functools.wraps(own)(lambda *given, **options: 2 * own(*given, **options))


def own_forward(model):
    model.forward = model.forward


def hooked_head(model):
    model.lm_head.register_forward_hook(lambda module, given, logits: 2 * logits)


def reclassed_head(model):
    model.lm_head.__class__ = Doubled


def parametrized_head(model):
    nn.utils.parametrizations.weight_norm(model.lm_head)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: nn.Sequential(nn.Linear(8, 8)), {}, "wants a causal language model"),
    (lambda: tiny("BertForMaskedLM", "BertConfig"), {}, "wants the loss ForCausalLMLoss, got ForMaskedLMLoss"),
    (lambda: tiny("GraniteForCausalLM", "GraniteConfig", logits_scaling=2.0), {}, "got others, such as scaled ones"),
    (lambda: tiny("CohereForCausalLM", "CohereConfig", logit_scale=0.5), {}, "got others, such as scaled ones"),
    (lambda: tiny("T5ForConditionalGeneration", "T5Config"), {}, "wants a decoder"),
    (lambda: edited(changed_head), {}, "wants an nn.Linear as output head, got a Sequential"),
    (lambda: edited(own_loss), {}, "wants the loss ForCausalLMLoss"),
    (lambda: edited(wrapped_loss), {}, "wants the loss ForCausalLMLoss of transformers, got one that wraps it"),
    (lambda: edited(own_forward), {}, "wants the model with its own forward"),
    (lambda: edited(hooked_head), {}, "wants an output head without extras, got hooks of the module"),
    (lambda: edited(reclassed_head), {}, "wants an nn.Linear as output head, got a Doubled"),
    (lambda: edited(parametrized_head), {}, "wants an output head without extras, got a parametrization"),
]


class Own(transformers.LlamaForCausalLM):
    """A forward with the loss of transformers, and with more."""

    more = "none"

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        logits = self.lm_head(hidden)
        if (self.more == "training" and self.training) or (self.more == "mask" and attention_mask is not None):
            logits = logits / 2
        if self.more == "twice":
            logits = self.lm_head(hidden / 2)
        loss = None if labels is None else self.loss_function(logits, labels, self.vocab_size, **kwargs)
        if loss is not None and self.more == "losses":
            loss = loss + self.loss_function(logits, labels, self.vocab_size, **kwargs)
        if loss is not None:
            adds = {"mean": lambda: logits.square().mean(), "sum": lambda: logits.square().sum()}
            loss = loss * logits.shape[1] if self.more == "shape" else loss + adds.get(self.more, lambda: 0)()
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


MORE = {
    **dict.fromkeys(("mean", "sum", "shape"), "wants logits that nothing but the loss reads"),
    **dict.fromkeys(("training", "mask"), "wants the same logits in training and in evaluation, with a mask and without"),
    "twice": "wants one call of the output head, got 2",
    "losses": "wants",
}


@pytest.mark.parametrize("more", MORE)
def test_a_forward_that_does_more_with_its_logits_is_refused(more):
    config = small(transformers.LlamaConfig)
    plain = Own(config)
    opfuse.fuse_(plain, loss="fused")
    assert plain(**batch()).logits is None
    model = Own(config)
    model.more = more
    with pytest.raises(ConversionError, match=MORE[more]):
        opfuse.fuse_(model, loss="fused")


def test_a_tuple_without_logits_has_all_else():
    """transformers puts the loss of a router before the logits."""
    plain = tiny("MixtralForCausalLM", "MixtralConfig", output_router_logits=True)
    model = copy.deepcopy(plain)
    opfuse.fuse_(model, loss="fused")
    own, found = (each(**batch(), return_dict=False) for each in (plain, model))
    assert len(found) == len(own) - 1
    assert torch.allclose(found[0], own[0])
    assert torch.allclose(found[1], own[1])
    assert found[1].dim() == 0
    assert all(torch.allclose(one, other) for one, other in zip(found[2], own[3]))


def edited(edit):
    model = llama(tied=False)
    edit(model)
    return model


@pytest.mark.parametrize(("make", "options", "why"), REFUSED, ids=[why for *_, why in REFUSED])
def test_another_loss_is_refused_and_the_model_stays_as_it_was(make, options, why):
    model = make()
    before = [set(vars(part)) for part in model.modules()]
    with pytest.raises(ConversionError, match=why):
        opfuse.fuse_(model, recipes.Float8CurrentScaling(), loss="fused", **options)
    assert [set(vars(part)) for part in model.modules()] == before


def test_another_word_for_the_loss_is_refused():
    with pytest.raises(ConversionError, match="fuse_ loss"):
        opfuse.fuse_(llama(), loss="liger")


def multiplied(model):
    model.model.lm_head_multiplier = 3.0


def capped(model):
    model.config.final_logit_softcapping = 3.0


def counted(model):
    model.config.vocab_size = WORDS - 1


READ: list[tuple[Any, Any, str]] = [
    (lambda: tiny("FalconH1ForCausalLM", "FalconH1Config"), multiplied, "'lm_head_multiplier' was 1.0, is 3.0.*scaled ones"),
    (
        lambda: tiny("Gemma2ForCausalLM", "Gemma2Config", final_logit_softcapping=2.0),
        capped,
        "'final_logit_softcapping', 2.0.*the softcap is 3.0",
    ),
    (llama, counted, f"'vocab_size', {WORDS}.*wants a loss over the {WORDS} words"),
]


@pytest.mark.parametrize(("make", "change", "why"), READ, ids=[change.__name__ for _, change, _ in READ])
def test_what_the_forward_reads_and_changes_the_logits_is_an_error_when_it_changes(make, change, why):
    model = make()
    opfuse.fuse_(model, loss="fused")
    given = batch()
    model(**given)
    change(model)
    for _ in range(2):
        with pytest.raises(ConversionError, match=f"{why}.*call fuse_ again after such a change"):
            model(**given)


def twice(function):
    return lambda *given, **options: 2 * function(*given, **options)


@pytest.mark.parametrize(
    "put",
    [
        lambda patch: patch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", twice(loss_utils.ForCausalLMLoss)),
        lambda patch: patch.setattr(loss_utils, "fixed_cross_entropy", twice(loss_utils.fixed_cross_entropy)),
        lambda patch: patch.setattr(nn.functional, "cross_entropy", twice(nn.functional.cross_entropy)),
    ],
    ids=["table", "function", "torch"],
)
def test_what_the_loss_calls_is_an_error_when_it_is_another_later(put, monkeypatch):
    model = llama()
    opfuse.fuse_(model, loss="fused")
    with monkeypatch.context() as patch:
        put(patch)
        with pytest.raises(ConversionError, match="got another loss_function, or other functions in it"):
            model(**batch())
    assert model(**batch()).logits is None
    with monkeypatch.context() as patch:
        put(patch)
        with pytest.raises(ConversionError, match="wants the loss"):
            opfuse.fuse_(llama(), loss="fused")


def test_what_acts_on_every_linear_layer_is_an_error(monkeypatch):
    """A hook of all modules, and another function of torch: no logits are made for them."""
    model = llama()
    opfuse.fuse_(model, loss="fused")
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    with pytest.raises(ConversionError, match="got a hook on the output head, or on all modules"):
        model(**batch())
    handle.remove()
    assert model(**batch()).logits is None
    monkeypatch.setattr(nn.functional, "linear", twice(nn.functional.linear))
    with pytest.raises(ConversionError, match="or torch's linear"):
        model(**batch())


def test_a_call_that_failed_leaves_nothing_behind():
    model, given = llama(), batch()
    opfuse.fuse_(model, loss="fused")
    with pytest.raises(Exception, match=r"shape|size"):
        model(input_ids=given["input_ids"], labels=given["labels"][:, :3])
    assert model(given["input_ids"]).logits.shape == (2, 16, WORDS)


def test_another_fused_model_that_is_called_in_between_has_its_logits():
    """As a teacher in a hook has."""
    model, teacher, given, seen = llama(), llama(), batch(), []
    wanted = teacher(given["input_ids"]).logits
    for each in (model, teacher):
        opfuse.fuse_(each, loss="fused")
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(teacher(given["input_ids"]).logits))
    loss = model(**given).loss
    assert torch.equal(seen[0], wanted)
    assert torch.allclose(loss, teacher(**given).loss)


def test_labels_may_come_by_their_place():
    model, given = llama(), batch()
    opfuse.fuse_(model, loss="fused")
    by_place = model(given["input_ids"], None, None, None, None, given["labels"])
    assert by_place.logits is None
    assert torch.equal(by_place.loss, model(**given).loss)


def test_a_loss_that_the_user_put_there_comes_back():
    model = llama()
    model.loss_function = own = loss_utils.ForCausalLMLoss
    opfuse.fuse_(model, loss="fused")
    assert model(**batch()).logits is None
    opfuse.unfuse_(model)
    assert vars(model)["_loss_function"] is own


def test_what_the_forward_reads_for_other_ends_may_change():
    """The forward is tried again, and has the same logits."""
    plain = tiny("MixtralForCausalLM", "MixtralConfig", output_router_logits=True)
    model = copy.deepcopy(plain)
    opfuse.fuse_(model, loss="fused")
    before = model(**batch()).loss
    for each in (plain, model):
        each.router_aux_loss_coef = 0.5
    agree(model, plain, batch())
    assert not torch.equal(model(**batch()).loss, before)


def hooked(model):
    model.lm_head.register_forward_hook(lambda module, given, logits: 2 * logits)


def halved(model):
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x) / 2


def headed(model):
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)


def lost(model):
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def reclassed(model):
    model.lm_head.__class__ = Doubled


@pytest.mark.parametrize("change", [hooked, halved, headed, lost, reclassed])
def test_what_changes_logits_or_the_loss_later_is_an_error(change):
    """No logits are made that it could act on. Without labels it acts as ever."""
    model, own = llama(), llama()
    own.load_state_dict(model.state_dict())
    opfuse.fuse_(model, None, loss="fused")
    torch.manual_seed(0)
    change(model)
    torch.manual_seed(0)
    change(own)
    given = batch()
    with pytest.raises(ConversionError, match="wants head, logits and loss as they were"):
        model(**given)
    plain = {name: value for name, value in given.items() if name != "labels"}
    assert torch.equal(model(**plain).logits, own(**plain).logits)
    if change is halved:
        with pytest.raises(ConversionError, match=r"lm_head\.forward: wants the one that fuse_ gave"):
            opfuse.unfuse_(model)
        return
    opfuse.unfuse_(model)
    if change is lost:
        assert torch.equal(model(**given).loss, own(**given).loss)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("made", "change", "refused"),
    [
        (lambda: llama(num_hidden_layers=1), counted, f"wants a loss over the {WORDS} words"),
        pytest.param(
            lambda: tiny("Gemma2ForCausalLM", "Gemma2Config", final_logit_softcapping=2.0, num_hidden_layers=1),
            capped,
            r"the softcap is 3\.0",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["words", "softcap"],
)
def test_a_graph_of_torch_compile_agrees_and_notices_what_its_forward_reads(made, change, refused):
    model = made()
    plain = copy.deepcopy(model)
    opfuse.fuse_(model, loss="fused")
    compiled = torch.compile(model, backend="aot_eager")
    agree(compiled, plain, batch())
    assert compiled(**batch()).logits is None
    change(model)
    with pytest.raises(ConversionError, match=refused):
        compiled(**batch())


def test_a_forward_put_over_it_is_undone_first():
    model = llama()
    opfuse.fuse_(model, loss="fused")
    own = model.forward
    model.forward = partial(own)
    for call in (opfuse.unfuse_, opfuse.fuse_):
        with pytest.raises(ConversionError, match="wants the one that fuse_ gave"):
            call(model)
    model.forward = own
    opfuse.unfuse_(model)


@pytest.mark.cpu
@pytest.mark.parametrize("bf16", in_turn([True, False], of=2))
def test_trainer_trains_as_with_the_models_own_loss(bf16, tmp_path):
    """Under bf16 Accelerate puts a function over the model's forward, and the model's own logits are rounded to bf16."""
    pytest.importorskip("accelerate")
    rows = [{name: value[0].tolist() for name, value in batch().items()} for _ in range(8)]
    losses = []
    for loss in ("own", "fused"):
        model = llama()
        opfuse.fuse_(model, loss=loss)
        options = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
        options |= {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2}
        given = transformers.TrainingArguments(str(tmp_path / loss), bf16=bf16, **options)
        trainer = transformers.Trainer(model, given, train_dataset=rows, eval_dataset=rows[:2])
        trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each] + [trainer.evaluate()["eval_loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2 if bf16 else 1e-4)
    assert losses[0][-1] < losses[0][0]
