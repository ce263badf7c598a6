"""Threads of a rank train at the same time, each in process groups of its own: the weights are those of one training after the other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hwfsdp import RankError, fully_shard, launch, record
from hwfsdp.comm import flight_recorder, shared_memory
from hwfsdp.features.lookup import Living

STEPS = 12
SIZES = (3, 17, 64, 5)  # of the models, one for each process group
THREADS: tuple[tuple[int, ...], ...] = ((0, 1), (2,), (3,))  # the models of each thread, which takes turns


class Training:
    """A model on its own process group, and its steps."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        size, self.number, self.group = SIZES[number], number, dist.new_group()
        mesh = DeviceMesh.from_group(self.group, "cpu")
        self.model = nn.Sequential(nn.Linear(size, 9), nn.Tanh(), nn.Linear(9, size))
        for layer in (self.model[0], self.model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        batch = torch.randn(6, SIZES[self.number], generator=generator)
        self.model[2].unshard(async_op=True)
        loss = (self.model(batch) - batch).square().mean()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)  # the user's own collective
        backward = threading.Thread(
            target=loss.backward
        )  # autograd calls the hooks in the thread that calls it
        backward.start()
        backward.join()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [p.full_tensor().detach() for p in self.model.parameters() if isinstance(p, DTensor)]


def weights_after(run: Callable[[Sequence[Training]], None]) -> list[list[Tensor]]:
    trainings = [Training(number) for number in range(len(SIZES))]
    run(trainings)
    return [training.weights() for training in trainings]


def one_after_the_other(trainings: Sequence[Training]) -> None:
    """Train in one thread, which is not the main thread either: OpenMP has a number of threads for each thread."""
    with ThreadPoolExecutor(1) as pool:
        for training in trainings:
            for seed in range(STEPS):
                pool.submit(training.step, seed).result()


def in_threads(trainings: Sequence[Training]) -> None:
    start = threading.Barrier(len(THREADS))

    def train(numbers: Sequence[int]) -> None:
        start.wait()
        for seed in range(STEPS):
            for number in numbers:
                trainings[number].step(seed)

    with ThreadPoolExecutor(len(THREADS)) as pool:
        for done in [pool.submit(train, numbers) for numbers in THREADS]:
            done.result()


def in_threads_recorded(trainings: Sequence[Training]) -> None:
    with record():
        in_threads(trainings)


def differences() -> tuple[list[bool], int, bool]:
    """Compare the weights. Return also the number of collectives left over, and whether memory for collectives is bounded."""
    expected = weights_after(one_after_the_other)
    same = [
        all(map(torch.equal, a, b))
        for run in (in_threads, in_threads_recorded)
        for a, b in zip(expected, weights_after(run), strict=True)
    ]
    return same, len(flight_recorder.waiting), len(shared_memory._pool.blocks) <= 4 * len(SIZES)


def test_threads_with_process_groups_of_their_own_train_as_one_after_the_other() -> None:
    assert launch(differences, 2, timeout=120) == [([True] * 2 * len(SIZES), 0, True)] * 2


def test_a_thread_may_list_what_another_one_adds() -> None:
    """The registries of groups and models. Without a lock, this fails almost always."""
    living, objects, interval = (
        Living[nn.Module](),
        [nn.Module() for _ in range(3000)],
        sys.getswitchinterval(),
    )
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            adding = pool.submit(lambda: [living.add(each) for each in objects])
            while not adding.done():
                living.listed()
            adding.result()
    finally:
        sys.setswitchinterval(interval)
    assert {*living.listed()} == {*objects}


# --- A thread that hangs ---------------------------------------------------------------------------------------


def a_thread_of_one_rank_waits() -> None:
    training = Training(0)
    training.step(0)
    if dist.get_rank() == 0:
        threading.Thread(target=training.step, args=(1,), name="trainer", daemon=True).start()
    threading.Event().wait()  # hang


def test_the_error_of_a_thread_that_waits_names_its_collective_and_shows_all_threads() -> None:
    with pytest.raises(RankError) as caught:
        launch(a_thread_of_one_rank_waits, 2, timeout=8)
    error = caught.value
    assert "(rank 0 waiting in all_gather of parameter group '2' (thread trainer), at " in error.got
    assert "; rank 1 in no collective, at " in error.got
    assert error.table.startswith("rank 0 waits in collective")
    assert "  thread trainer:" in str(error) and "  thread MainThread:" in str(error)
