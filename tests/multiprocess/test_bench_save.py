"""`renkei bench all-reduce --save`: what it finds is what later jobs use, and say that they do."""

from __future__ import annotations

import json
from pathlib import Path

from multiprocess.commands import RENKEI, check_json_alone, run


def test_what_was_measured_is_used_and_said(tmp_path: Path) -> None:
    file = str(tmp_path / "tuning.json")
    outcome = run(RENKEI, "bench", "all-reduce", "-n", "2", "--save", "--json", cwd=tmp_path, RENKEI_TUNING=file)
    found = check_json_alone(outcome)
    assert found["file"] == file
    assert f"{found['communicator']}, {found['bucket_bytes'] / 2**20:g} MiB buckets" in str(found["milliseconds"])
    for what in ("milliseconds", "processor_milliseconds"):
        assert list(found["exchanges"][what]) == ["fp32", "bf16", "int8"]
    ((key, kept),) = json.loads(Path(file).read_text()).items()
    assert key.startswith("nodes x ranks: 1 x 2; cpu; ")
    assert kept == {name: value for name, value in found.items() if name != "file"}

    script = tmp_path / "script.py"
    script.write_text(
        "import renkei\n"
        "with renkei.create_communicator() as comm:\n"
        "    sizes = {each.rest for each in comm.all_gather_object(comm.bucket_sizes)}\n"
        "    if comm.rank == 0: print(comm.options.chunk_bytes, *sizes)\n"
    )
    outcome = run(RENKEI, "launch", "-n", "2", str(script), cwd=tmp_path, RENKEI_TUNING=file)
    assert outcome.code == 0, outcome.err
    assert outcome.out.split() == [str(found["chunk_bytes"]), str(found["bucket_bytes"])]
    assert f"{found['communicator']}, cpu, 1 thread a rank; as measured on {found['measured_on']}" in outcome.err

    outcome = run(RENKEI, "launch", "-n", "3", str(script), cwd=tmp_path, RENKEI_TUNING=file)
    assert outcome.code == 0, outcome.err
    assert "as measured" not in outcome.err  # for it was on another number of ranks
