"""The homework, FSDP in one file: what must hold.

Task 1 is judged on three processes, part by part, and against PyTorch without sharding. Tasks 2 and 3 are judged on simulated machines,
one rank of eight, where times are calculated and every race shows. The stations 08 and 10 explain these machines.

    ranks(3)          three processes, which compute with numbers
    gpu(WIDE)         a virtual GPU: the host issues work and goes on
    host(WIDE)        a virtual host, which computes by itself
    held(DEEP)        the bytes that are alive in a step besides rows, in units of the largest block

    pytest exercises/homework -k gather     one test; the order of the tests is the order of work

The tasks and the tests `bonus_…` use models whose rows the ranks can share evenly, with sharded modules side by side. The tests `ours_…`
use all others, with a sharded root.
"""

from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby

import facts_homework as facts
import pytest
import torch

from hwfsdp.course import laws, machines, scenarios, timing
from hwfsdp.course.facts import whole_bytes
from hwfsdp.course.findings import Finding
from hwfsdp.course.scenarios import BF16, FP32, Scenario

pytestmark = pytest.mark.exercise("homework", title="FSDP in one file", file="hw_fsdp.py")

LOW = (("param_dtype", BF16), ("reduce_dtype", FP32))
PLAIN = Scenario("an even model, two micro-batches", "even", steps=2, micros=2)
MIXED = Scenario("bf16, reduced in fp32", "even", steps=1, policy=LOW)
DEEP = Scenario("a deep model", "even and deep")
WIDE = replace(machines.WIDE, config=replace(machines.WIDE.config, layers=4), root=False)
NARROW = replace(machines.NARROW, root=False, gain=False)  # updates after one and after two micro-batches

RECOMPUTED = Scenario("checkpointing, non-reentrant", "even and recomputed", steps=1)
REENTRANT = Scenario("checkpointing, reentrant", "even and recomputed, reentrant", steps=1)
WHOLE = Scenario("reshard_after_forward=False", "even", steps=2, reshard=False)
KEPT = Scenario("set_reshard_after_backward(False)", "even", steps=2, micros=3, keep=True)
SUMMED = Scenario("set_requires_gradient_sync(False)", "even", steps=2, micros=3, sync_last=True)
SUMMED_LOW = SUMMED._replace(name="bf16 micro-batches, reduced at last in fp32", steps=1, policy=LOW)
EVALUATED = Scenario("an even model, evaluated in between", "even", steps=2, peeked=True)
UNEVEN = Scenario("an uneven model", "gained", steps=2, peeked=True)
CASTS = Scenario("an uneven model in bf16", "gained", steps=1, policy=(*LOW, ("output_dtype", FP32)))
NAMED = CASTS._replace(name="blocks with keyword arguments, in bf16", model="gained and called by name")
FROZEN = Scenario("frozen parameters", "gained and frozen", steps=2)
TIED = Scenario("tied parameters", "tied", steps=2)
NESTED = Scenario("nested modules", "gained and nested", steps=2)


# --- Task 1: forward, then a full step ---------------------------------------------------------------------


def part_of(ranks, seed, name):
    return ranks(3).ask(facts.probe_parts, name, seed=seed, scenario=PLAIN)


@pytest.mark.points(1, ask="Which rows does this rank keep, and what does the optimizer get to see?")
def test_shard(ranks, seed):
    """After fully_shard, every parameter is a DTensor, Shard(0) on the mesh, with this rank's rows."""
    placed_by_rows(part_of(ranks, seed, "shards"), PLAIN, seed)


@pytest.mark.points(1, ask="Which memory does the gather fill, and when may a module read it?")
def test_gather(ranks, gpu, seed):
    """By hand: unshard and wait_for_unshard register the whole parameters, and reshard gives their memory back."""
    found, block = part_of(ranks, seed, "gathers"), scenarios.build(PLAIN, seed).model.blocks[0]
    for rank, time in enumerate(found):
        for number, (name, param) in ((n, each) for n in range(2) for each in block.named_parameters()):
            where = f"Rank {rank}, blocks.0.{name}{' after an update of the rows' if number else ''}"
            with explained_by_races(gpu):
                registered(where, time[number], name, param.detach() + number, is_updated=number > 0)


@pytest.mark.points(1, ask="What is whole during a forward, and what is left of it afterwards?")
def test_forward(ranks, gpu, seed):
    """Outputs equal the unsharded model's, and a second forward gathers everything again."""
    found, model = part_of(ranks, seed, "forward"), scenarios.build(PLAIN, seed).model
    whole = laws.padded_bytes(PLAIN, seed, len(found))
    for rank, each in enumerate(found):
        if each["bytes"] != whole:
            words = f"Rank {rank}: a second forward gathers {each['bytes']:,} B, the model has {whole:,} B"
            kind, more = "not-freed", ""
            if each["bytes"] > whole:
                kind, more = "gathered-again", laws.too_often(each["owners"])
            raise Finding(kind, f"{words}{more}.", whole, each["bytes"])
        for number, output in enumerate(each["outputs"]):
            with torch.no_grad(), explained_by_races(gpu):
                right = model(scenarios.batch_of(model, seed, rank, number))
                close(f"Rank {rank}: the output of forward {number + 1}", output, right)


@pytest.mark.points(1, ask="Which weights does a backward read, and where are they after a forward?")
def test_backward(ranks, seed):
    """A backward gathers what the forward freed. A gradient inside the last module is right; parameters may have none yet."""
    for rank, found in enumerate(gone_back(ranks, seed)):
        model, x = facts.two_halves(seed, rank)
        model(x).square().sum().backward()
        got, right = found["between"][0], model[1].between[0]
        if not found["gathers"]:
            kind = (
                "not-gathered" if not torch.allclose(got, right, rtol=1e-4, atol=1e-6) else "never-resharded"
            )
            raise Finding(kind, f"Rank {rank}: a backward gathers nothing.", "an all-gather", "none")
        close(f"Rank {rank}: the gradient between the last module's layers", got, right)


@pytest.mark.points(
    1, ask="Follow one gradient from autograd to the rows of one rank: what happens to it on the way?"
)
@pytest.mark.parametrize("world_size", [3, 2])
def test_parity(ranks, gpu, seed, world_size):
    """Every loss and every gradient of two steps, of two micro-batches each, equals the unsharded model's, on two and three ranks."""
    found = ranks(world_size).train(PLAIN, seed)
    with explained_by_races(gpu):
        laws.same_numbers(found, PLAIN, seed)


@pytest.mark.points(1, ask="Which buffers are alive at the moment of the peak, and which code frees each?")
def test_memory(ranks, held, seed):
    """Few blocks are whole at a time, nothing is left after a forward or a backward, and everything travels once.

    Besides rows, there are at most two blocks in a forward: one that computes, and the buffer of its own gather or of the next one.
    In a backward there are at most two more: the block's whole gradients, and the buffer of a reduction.
    """
    found, trained = held(DEEP), ranks(3).train(PLAIN, seed)
    laws.few_alive(found, DEEP, "before")
    laws.few_alive(found, DEEP, "between", kind="replaced-not-resized")
    laws.few_alive(found, DEEP, "after")
    laws.few_alive(found, DEEP, "forward", 2, "unbounded-prefetch")
    laws.few_alive(found, DEEP, "backward", 4, found["why"][0])
    travels_once(trained, PLAIN, seed)


@pytest.mark.points(
    1, ask="In which dtype does each collective get its tensor, and where does each cast stand?"
)
def test_mixed(ranks, gpu, seed):
    """Bytes travel in the dtypes of mp_policy. On two ranks, losses and gradients equal FSDP2's, bit for bit."""
    equals_fsdp2(trained_by_both(ranks, MIXED, seed), MIXED, gpu)


# --- Tasks 2 and 3: overlap --------------------------------------------------------------------------------


def order_is_right(part, *steps):
    """Every operator waits for what it needs, and the step computes with what travels."""
    for step in steps:
        timing.no_races(step, part)
    for step in steps:
        timing.computes_with_what_travels(step, part)


@pytest.mark.points(
    1, ask="What does compute wait for before this module, and what does the gather wait for?"
)
def test_forward_prefetch(gpu):
    """Task 2: on a GPU, the gathers of a forward travel while modules compute; only the first gather is exposed."""
    step = gpu(WIDE)
    order_is_right("forward", gpu(NARROW), step)
    timing.exposed(step, "forward", at_most=SHARE * step.gather_us + LAUNCHES)


@pytest.mark.points(1, ask="Which module's backward comes next, and how can a module know?")
def test_backward_prefetch(gpu, host, held):
    """Task 3: a backward gathers each module once, before the compute that hides the gather; only the first gather is exposed."""
    step, found = host(WIDE), held(DEEP)
    each_once(step)
    order_is_right("backward", gpu(NARROW), step)
    timing.exposed(step, "backward", at_most=SHARE * step.gather_us, misconception="not-prefetched")
    if in_flight(step) <= 2:
        laws.few_alive(found, DEEP, "backward", 4, "unbounded-prefetch")


@pytest.mark.points(
    1,
    ask="What does compute do while a gradient travels, and what must be over before one more reduction starts?",
)
def test_reduce_overlap(gpu, host, held):
    """Task 3: the gradients of a module travel while the next module computes its own; only the last reduction is exposed."""
    step, found = host(WIDE), held(DEEP)
    order_is_right("reduction", gpu(NARROW), step)
    timing.exposed(step, "reduction", at_most=SHARE * step.reduce_us)
    if in_flight(step) > 2:
        laws.few_alive(found, DEEP, "backward", 4, "unbounded-reductions")


# --- Bonuses -----------------------------------------------------------------------------------------------


@pytest.mark.points(1, bonus=True, ask="In which state is a module when it runs its forward a second time?")
@pytest.mark.parametrize("model", [RECOMPUTED, REENTRANT], ids=str)
def test_bonus_checkpoint(ranks, gpu, seed, model):
    """Activation checkpointing, around a sharded module and inside one, reentrant or not: gradients are the unsharded model's."""
    found = ranks(2).train(model, seed)
    with explained_by_races(gpu):
        laws.same_numbers(found, model, seed)


@pytest.mark.points(1, bonus=True, ask="Which modules are whole when the backward begins?")
def test_bonus_forward(ranks, gpu, seed):
    """With reshard_after_forward=False, a backward gathers nothing."""
    found = ranks(2).train(WHOLE, seed)
    travels_once(found, WHOLE, seed)
    with explained_by_races(gpu):
        laws.same_numbers(found, WHOLE, seed)


@pytest.mark.points(1, bonus=True, ask="Which code frees the modules after the last micro-batch?")
def test_bonus_backward(ranks, gpu, seed):
    """After set_reshard_after_backward(False) on each module, the forward of the next micro-batch gathers nothing."""
    found = ranks(2).train(KEPT, seed)
    whole = laws.padded_bytes(KEPT, seed, len(found))
    for micro in range(KEPT.micros):
        kinds = ("gathered-again", "not-gathered")
        laws.carried(found, KEPT, f"forward {micro}", "all_gather", 0 if micro else whole, kinds)
    with explained_by_races(gpu):
        laws.same_numbers(found, KEPT, seed)


@pytest.mark.points(
    1, bonus=True, ask="Where does a whole gradient wait until it is reduced, and in which dtype?"
)
def test_bonus_sync(ranks, gpu, seed):
    """After set_requires_gradient_sync(False) on each module, only the last micro-batch reduces; gradients add up in the reduce dtype."""
    found, low = ranks(2).train(SUMMED, seed), trained_by_both(ranks, SUMMED_LOW, seed)
    travels_once(found, SUMMED, seed)
    laws.nothing_early(found, SUMMED)
    with explained_by_races(gpu):
        laws.same_numbers(found, SUMMED, seed)
    equals_fsdp2(low, SUMMED_LOW, gpu)


# --- Bonuses of this course --------------------------------------------------------------------------------


@pytest.mark.points(1, bonus=True, ask="How many rows has the last rank, and how many does it send?")
def test_ours_uneven(ranks, seed):
    """Numbers of rows that the ranks cannot share evenly, or fewer rows than ranks, and a sharded root."""
    trains_with_its_rows(ranks(3).train(UNEVEN, seed), UNEVEN, seed)


@pytest.mark.points(1, bonus=True, ask="Which tensors does a module get, and which does it return?")
@pytest.mark.parametrize("model", [CASTS, NAMED], ids=str)
def test_ours_casts(ranks, gpu, seed, model):
    """Arguments, keyword arguments too, are cast to param_dtype, and outputs to output_dtype."""
    equals_fsdp2(trained_by_both(ranks, model, seed), model, gpu, output=FP32)


@pytest.mark.points(1, bonus=True, ask="What does a reduction do with a parameter that has no gradient?")
def test_ours_frozen(ranks, seed):
    """Frozen parameters in a block, a frozen block and a frozen embedding are gathered in each forward, and get no gradient."""
    found = ranks(2).train(FROZEN, seed)
    whole = laws.padded_bytes(FROZEN, seed, len(found))
    laws.carried(found, FROZEN, "forward", "all_gather", whole, ("gathered-again", "not-gathered"))
    trains_with_its_rows(found, FROZEN, seed)
    laws.reduces_what_has_a_gradient(found, FROZEN, seed)


@pytest.mark.points(1, bonus=True, ask="In how many places is this parameter registered?")
def test_ours_tied(ranks, seed):
    """The output layer's weight is the embedding's, and a module has one parameter under two names, before and after sharding."""
    trains_with_its_rows(ranks(2).train(TIED, seed), TIED, seed)


@pytest.mark.points(
    1, bonus=True, ask="Which call of fully_shard owns the parameters of a module inside another one?"
)
def test_ours_nested(ranks, seed):
    """A block does not shard again what is sharded inside it, even if nothing is left; one collective moves all parameters of a module."""
    try:
        found = ranks(2).train(NESTED, seed)
    except Finding as finding:
        if finding.misconception == "crashed" and "DTensor" in finding.message:
            raise Finding("claimed-twice", finding.message) from None
        raise
    laws.same_rows(found, NESTED, seed)
    units, whole = scenarios.build(NESTED, seed).units, laws.padded_bytes(NESTED, seed, len(found))
    number = sum(whole_bytes(module, units) > 0 for _, module in units)
    laws.counts(found, NESTED, seed, "forward", "all_gather", number, "one-by-one", "not-gathered")
    laws.counts(found, NESTED, seed, "backward", "reduce_scatter", number, "one-by-one", "not-reduced")
    laws.carried(found, NESTED, "forward", "all_gather", whole, ("claimed-twice", "not-gathered"))
    trains_with_its_rows(found, NESTED, seed)


@pytest.mark.points(
    1, bonus=True, ask="What does your file remember of a forward, and which code forgets it?"
)
def test_ours_evaluated(ranks, gpu, seed):
    """After a forward without a backward, as when only the loss is needed, the next step gathers nothing twice."""
    found = ranks(2).train(EVALUATED, seed)
    travels_once(found, EVALUATED, seed)
    with explained_by_races(gpu):
        laws.same_numbers(found, EVALUATED, seed)


# --- Laws --------------------------------------------------------------------------------------------------

SHARE = 1.15  # times the travel of one module, because a file may make one collective for each parameter
LAUNCHES = (
    300.0  # µs on the GPU: a file may make one gather for each parameter, and each is issued by the host
)


@contextmanager
def explained_by_races(gpu):
    """If numbers differ and their finding does not say why, a race on the virtual GPU is the cause, if there is one."""
    try:
        yield
    except Finding as finding:
        if finding.known.vague:
            timing.no_races(gpu(NARROW))
        raise


def close(where, got, right):
    if got.shape != right.shape or not torch.allclose(got, right, rtol=1e-4, atol=1e-5):
        raise Finding("wrong-value", f"{where} is wrong {laws.largest_difference(got, right)}.", right, got)


def placed_by_rows(found, scenario, seed):
    """Every parameter has this rank's rows, and is a DTensor with the whole shape, Shard(0) on a mesh of all ranks."""
    laws.same_rows(found, scenario, seed)
    for name, param in scenarios.build(scenario, seed).model.named_parameters(remove_duplicate=False):
        right = [list(param.shape), ["S(0)"], list(range(len(found)))]
        for rank, each in enumerate(found):
            if (got := each["rows"][name]["placed"]) != right:
                shown = f"a DTensor of shape {got[0]}, {got[1]} on ranks {got[2]}" if got else "no DTensor"
                said = f"{scenario.name}, rank {rank}: {name} is {shown}."
                raise Finding("wrong-placement", said, f"{right[1]} on ranks {right[2]}", shown)


def registered(where, found, name, right, is_updated):
    """The parameter was whole, and now its shard is registered again and the memory is given back."""
    whole, kind = found["whole"].get(name), found["kinds"].get(name)
    if whole is None or whole.shape != right.shape:
        shown = "the shard" if whole is None else f"shape {tuple(whole.shape)}"
        raise Finding(
            "not-gathered", f"{where}: after wait_for_unshard the module has {shown}.", "the whole", shown
        )
    if not torch.allclose(whole, right):
        at = laws.largest_difference(whole, right)
        raise Finding(
            "update-not-seen" if is_updated else "wrong-value", f"{where}: the whole is wrong {at}."
        )
    if kind not in ("Parameter", "DTensor"):
        raise Finding("not-registered", f"{where}: after reshard, a {kind} is registered.", "the shard", kind)
    if found["alive"]:
        said = f"{where}: after reshard, {found['alive']:,} B of whole parameters are still there."
        raise Finding("not-freed", said, 0, found["alive"])


def gone_back(ranks, seed):
    try:
        return part_of(ranks, seed, "backward")
    except Finding as finding:
        if finding.misconception == "read-while-freed":  # the forward gathered another module
            raise Finding("not-gathered", finding.message) from None
        raise


def travels_once(found, scenario, seed):
    """Every parameter is gathered once wherever it must be, and its gradient reduced once after the last micro-batch."""
    whole = laws.padded_bytes(scenario, seed, len(found))
    again = 0 if scenario.reshard is False else whole
    for micro in range(scenario.micros):
        reduced = whole if micro == scenario.micros - 1 or not scenario.sync_last else 0
        for phase, op, nbytes, kinds in (
            ("forward", "all_gather", whole, ("gathered-again", "not-gathered")),
            ("backward", "all_gather", again, ("gathered-again", "never-resharded")),
            ("forward", "reduce_scatter", 0, ("reduced-too-often", "not-reduced")),
            ("backward", "reduce_scatter", reduced, ("reduced-too-often", "not-reduced")),
        ):
            laws.carried(found, scenario, f"{phase} {micro}", op, nbytes, kinds)


def trained_by_both(ranks, scenario, seed):
    """Train with the file, and with torch's FSDP2."""
    return ranks(2).train(scenario, seed), ranks(2).fsdp2(scenario, seed)


def equals_fsdp2(trained, scenario, gpu, output=BF16):
    """Everything travels in the policy's dtypes, the output has its dtype, and all numbers are FSDP2's."""
    found, theirs = trained
    laws.outputs(found, scenario, output)
    laws.dtypes(found, scenario, "all_gather", BF16, "gathered-in-wrong-dtype")
    laws.dtypes(found, scenario, "reduce_scatter", FP32, "reduced-in-wrong-dtype")
    with explained_by_races(gpu):
        laws.same_bits(found, theirs, scenario)


def trains_with_its_rows(found, scenario, seed):
    placed_by_rows(found, scenario, seed)
    laws.same_numbers(found, scenario, seed)


def each_once(step):
    """A backward gathers each module once. A module may make one gather for each parameter."""
    order = [owner for owner, _ in groupby(each.owner for each in step.travels("backward"))]
    if twice := sorted({each for each in order if order.count(each) > 1}):
        said = f"{step.name}: a backward gathers {', '.join(order)}. More than once: {', '.join(twice)}."
        raise Finding("guessed-wrong", said, "each once, the last first", ", ".join(order))


def in_flight(step):
    """Return the most reductions, of whole modules, that are started and compute has not waited for."""
    return max(step.in_flight(), default=0) * step.units / max(1, len(step.travels("reduction")))
