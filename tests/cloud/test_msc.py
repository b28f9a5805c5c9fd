"""URLs of multi-storage-client: profiles of its configuration serve datasets."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import start_forked
from test_object_storage import content, mix

from energon_bridge.core.errors import ShardMissingError
from energon_bridge.core.storage import open_store

pytest.importorskip("multistorageclient", reason="multi-storage-client is not installed (extra msc)")


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    options = f"{{base_path: {tmp_path / 'data'}}}"
    (tmp_path / "msc.yaml").write_text(
        f"profiles:\n  near:\n    storage_provider: {{type: file, options: {options}}}\n"
    )
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.yaml"))


def test_a_profile_is_a_store_and_serves_a_mix(tmp_path: Path) -> None:
    store = open_store("msc://near/a")
    store.write("x", b"0123456789")
    assert (store.read("x"), store.read_range("x", 2, 3), store.size("x")) == (b"0123456789", b"234", 10)
    assert (store.exists("x"), store.exists("y"), store.list()) == (True, False, [("x", 10)])
    with pytest.raises(ShardMissingError, match="msc://near/a/none: no such file"):
        store.read("none")
    assert start_forked(lambda: store.read_range("x", 1, 1)).result() == (True, b"1")
    name = mix(tmp_path / "data")
    assert content(f"msc://near/{name}", 12, stop=5) == content(tmp_path / "data" / name, 12)
