"""Kits: who gets one, what is in it, and that adding, renewing and revoking touch nobody else."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.core import VERSION
from atoll.core.errors import ClientFailedError, UserError
from atoll.engines.network.egress import EgressLog
from atoll.engines.network.kits import COORDINATOR, Kit, init, renew
from atoll.engines.network.mirror import Mirror, append_only
from atoll.engines.network.rehearsal import outdate
from atoll.engines.network.site import join, reachable
from atoll.runs.config import change, resolve

from .federation import Federation

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = pytest.mark.process


def project(folder: Path, *sites: str) -> Path:
    path = folder / "project.toml"
    path.write_text(f'name = "alps"\nport = 8102\nsites = {json.dumps(sites)}\n')
    return path


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_adding_renewing_and_revoking_touch_nobody_else(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    assert init(project(tmp_path, "basel", "bern"), out)["new"] == [COORDINATOR, "basel", "bern"]
    before = {name: content(out / name) for name in (COORDINATOR, "basel", "bern")}
    assert init(project(tmp_path, "basel", "bern"), out) == {
        "new": [],
        "awaited": [],
        "revoked": [],
    }

    assert init(project(tmp_path, "basel", "bern", "zug"), out)["new"] == ["zug"]
    assert content(out / "basel") == before["basel"]
    assert content(out / "bern") == before["bern"]
    now = content(out / COORDINATOR)
    assert {name for name in now if now[name] != before[COORDINATOR].get(name)} == {"sites.json"}
    for name in ("basel", "bern", "zug", COORDINATOR):
        assert Kit(out / name).check() == ""

    renew(project(tmp_path, "basel", "bern", "zug"), out, "basel")
    now = content(out / "basel")
    changed = {name for name in now if now[name] != before["basel"][name]}
    assert changed == {"startup/client.crt", "startup/client.key"}
    assert content(out / "bern") == before["bern"]
    assert Kit(out / "basel").check() == ""

    assert init(project(tmp_path, "basel", "zug"), out)["revoked"] == ["bern"]
    assert Kit(out / COORDINATOR).sites == ["basel", "zug"]
    assert content(out / "bern") == before["bern"]


def test_private_keys_are_in_their_own_kits_alone_and_only_the_owner_reads_them(
    tmp_path: Path,
) -> None:
    out = tmp_path / "kits"
    init(project(tmp_path, "basel"), out)
    keys = sorted(
        path for path in out.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()
    )
    assert [str(path.relative_to(out)) for path in keys] == [
        "authority/alps/state/cert.json",
        "basel/startup/client.key",
        "coordinator/admin/startup/client.key",
        "coordinator/startup/server.key",
    ]
    for path in keys:
        assert path.stat().st_mode & 0o077 == 0, path
    kept = json.loads((out / "authority" / "alps" / "state" / "cert.json").read_text())
    assert set(kept) == {"root_cert", "root_pri_key"}


def test_a_sites_policy_lets_in_no_code_no_shell_and_no_other_class(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    init(project(tmp_path, "basel"), out)
    local = out / "basel" / "local"
    resources = json.loads((local / "resources.json").read_text())
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert [name.rpartition(".")[2] for name in resources["class_allow_list"]] == [
        "CollabController", "CollabExecutor", "Coordinator", "Outpost",
    ]  # fmt: skip
    assert resources["allow_log_streaming"] is False
    rights = json.loads((local / "authorization.json").read_text())["permissions"]
    assert list(rights) == ["project_admin"]
    assert {k for k, v in rights["project_admin"].items() if v == "none"} == {
        "byoc", "shell_commands", "download_job",
    }  # fmt: skip
    assert list((out / "basel").rglob("*.sh")) == []


def test_a_kit_that_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    init(project(tmp_path, "basel"), out)
    kit, authority = Kit(out / "basel"), out / "authority/alps/state/cert.json"
    outdate(kit.folder, authority)
    with pytest.raises(UserError, match="the certificate of basel ended on"):
        kit.check()
    with pytest.raises(UserError, match="not a party's folder"):
        Kit(tmp_path).check()
    (kit.folder / "startup" / "client.crt").write_text("nothing")
    with pytest.raises(UserError, match="not a certificate"):
        kit.check()


def site_file(kit: Kit, store: str = "../store") -> Path:
    path = kit.folder / "site.toml"
    terms = '[contract]\nmethods = ["fedavg"]\nactions = ["fit", "check"]\n'
    path.write_text(f"store = {json.dumps(store)}\n{terms}")
    return path


def stays_away(line: str) -> None:
    raise AssertionError(f"it went on: {line}")


def test_a_site_whose_log_is_broken_is_refused_before_it_connects(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    init(project(tmp_path, "basel"), out)
    kit = Kit(out / "basel")
    (out / "store").mkdir()
    (out / "store" / "egress.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="the chain of the egress log is broken at line 1"):
        join(kit, site_file(kit), stays_away, lambda: False)


def test_a_site_that_cannot_open_its_gate_says_so_when_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.engines.network import nvflare  # noqa: PLC0415 - only where it is installed

    monkeypatch.setattr(nvflare, "_die_with_parent", lambda: None)  # this process may go on
    kit = Kit(tmp_path)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "egress.jsonl").write_text("{}\n")
    monkeypatch.setenv("ATOLL_SITE", str(site_file(kit, "store")))
    outpost = nvflare.Outpost()
    outpost.begin()
    said = "the site has to fix something; its log says what"
    closed = {"ok": False, "kind": "failed", "reason": said}
    told = outpost.prepare("run-1", "", "site-0", ["site-0"], "")
    assert told == {**closed, "version": VERSION}
    assert outpost.handle("run-1", 1, "fit", [0, 0, 1], b"", b"") == closed
    assert outpost.ping() == {"doing": ""}


def test_a_store_within_the_kit_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    init(project(tmp_path, "basel"), out)
    kit = Kit(out / "basel")
    assert 'store = "../basel-store"' in (kit.folder / "site.toml").read_text()
    for store in ("store", ".", "../basel/startup"):
        with pytest.raises(UserError, match="the store lies within the kit") as caught:
            join(kit, site_file(kit, store), stays_away, lambda: False)
        assert caught.value.remedy.startswith('write store = "../basel-store"')


def test_a_site_whose_log_has_vanished_or_was_cut_is_stopped(tmp_path: Path) -> None:
    out, told = tmp_path / "kits", list[str]()
    init(project(tmp_path, "basel"), out)
    kit = Kit(out / "basel")
    site, log = site_file(kit), out / "store" / "egress.jsonl"

    def deleted(line: str) -> None:
        append_only(log, False)  # as somebody who may do everything here
        log.unlink()

    join(kit, site, stays_away, lambda: True, told.append)
    assert told[0].startswith("basel: 0 bytes have left in 0 lines")
    assert (out / "store").stat().st_mode & 0o777 == 0o700
    filled = EgressLog(log, Mirror.of_kit(kit.folder))
    filled.refused("run-1", "fit", "not in the contract")
    whole = log.read_bytes()
    with pytest.raises(UserError, match="vanished or become shorter while the site had joined"):
        join(kit, site, deleted, lambda: False, told.append)
    assert f"in 1 lines, which end in {filled.last}" in told[2]
    with pytest.raises(UserError, match="the egress log has 0 lines and had 1"):
        join(kit, site, stays_away, lambda: False)
    log.write_bytes(whole)
    join(kit, site, stays_away, lambda: True)


def test_a_site_without_the_copy_of_its_logs_end_goes_on_when_its_owner_says_so(
    tmp_path: Path,
) -> None:
    out, told = tmp_path / "kits", list[str]()
    init(project(tmp_path, "basel"), out)
    kit = Kit(out / "basel")
    site, mirror = site_file(kit), Mirror.of_kit(kit.folder)
    join(kit, site, stays_away, lambda: True)
    log = EgressLog(out / "store" / "egress.jsonl", mirror)
    log.refused("run-1", "fit", "not in the contract")
    mirror.path.unlink()
    with pytest.raises(UserError, match="no copy of the egress log's end is here"):
        join(kit, site, stays_away, lambda: True)
    assert not mirror.path.exists()
    join(kit, site, stays_away, lambda: True, told.append, accept_log=True)
    assert "in 2 lines" in told[0]
    assert "accepted at this site" in log.path.read_text()


def test_a_site_whose_log_and_its_copy_are_gone_says_what_is_left_of_runs(tmp_path: Path) -> None:
    out, told = tmp_path / "kits", list[str]()
    init(project(tmp_path, "basel"), out)
    kit = Kit(out / "basel")
    site = site_file(kit)
    join(kit, site, stays_away, lambda: True, told.append)
    assert "earlier runs" not in "".join(told)
    Mirror.of_kit(kit.folder).path.unlink()
    (out / "store" / "run-1").mkdir()
    (out / "store" / "run-1" / "shared.safetensors").touch()
    (kit.folder / "9ed80a6e-fb83-4a5d-b303-0e6b87c52e97").mkdir()
    told.clear()
    join(kit, site, stays_away, lambda: True, told.append)
    assert told[0] == (
        "basel: the egress log and the copy of its end are gone, but there are traces of earlier"
        " runs: run-1 in the store, 1 jobs in the kit; budgets begin anew"
    )


def test_what_has_left_is_not_said_of_a_store_that_is_not_there(tmp_path: Path) -> None:
    ended = Federation(tmp_path).call("egress", "nowhere")
    assert ended.returncode == 2
    assert "no egress log here" in ended.stderr


def test_what_has_left_is_said_of_an_empty_log_and_not_of_one_that_was_emptied(
    tmp_path: Path,
) -> None:
    (tmp_path / "basel-store").mkdir()
    log = EgressLog(tmp_path / "basel-store" / "egress.jsonl", Mirror.of_kit(tmp_path / "basel"))
    log.path.touch()
    ended = Federation(tmp_path).call("egress", "basel-store")
    assert (ended.returncode, ended.stdout) == (0, "the log is empty: nothing has left this site\n")
    log.refused("run-1", "\x1b[2J", "not in the contract")
    ended = Federation(tmp_path).call("egress", "basel-store")
    assert "run-1  refused '?[2J': not in the contract" in ended.stdout
    log.path.write_bytes(b"")
    ended = Federation(tmp_path).call("egress", "basel-store")
    assert ended.returncode == 2
    assert "the egress log has 0 lines and had 1" in ended.stderr


def test_two_sites_cannot_use_the_same_store_at_once(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    init(project(tmp_path, "basel", "bern"), out)
    files = [site_file(Kit(out / name), "../store") for name in ("basel", "bern")]

    def other(line: str) -> None:
        with pytest.raises(UserError, match="another site uses this store"):
            join(Kit(out / "bern"), files[1], stays_away, lambda: False)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        join(Kit(out / "basel"), files[0], other, lambda: False)
    join(Kit(out / "bern"), files[1], stays_away, lambda: True)  # it is free again


def test_a_key_that_does_not_fit_or_is_not_there_is_said(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    init(project(tmp_path, "basel", "bern"), out)
    kit = Kit(out / "basel")
    key = kit.folder / "startup" / "client.key"
    key.write_bytes((out / "bern" / "startup" / "client.key").read_bytes())
    with pytest.raises(UserError, match="the key does not fit the certificate of basel"):
        kit.check()
    assert reachable(kit) == (
        "this site's key and certificate cannot be used: key values mismatch"
    )  # fmt: skip
    key.write_text("nothing")
    with pytest.raises(UserError, match="not a private key"):
        kit.check()
    key.unlink()
    with pytest.raises(UserError, match="no such file") as caught:
        kit.check()
    assert caught.value.where == str(key)
    assert reachable(kit).endswith("cannot be used: no such file or directory")


def test_only_the_server_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look behind the filter: by whom NVFlare says that a method was called."""
    from nvflare.collab.api.context import set_call_context  # noqa: PLC0415 - where it is installed
    from nvflare.collab.api.decorators import is_publish  # noqa: PLC0415

    from atoll.engines.network import nvflare  # noqa: PLC0415

    monkeypatch.setattr(nvflare, "_die_with_parent", lambda: None)
    monkeypatch.setenv("ATOLL_SITE", str(site_file(Kit(tmp_path), "store")))
    outpost, nothing = nvflare.Outpost(), b""
    outpost.begin()
    assert outpost._gate is not None
    outpost._gate.doing = "fit"
    calls = (
        lambda: outpost.offer("run-1", "", "site-0", nothing, nothing),
        lambda: outpost.agree(nothing, nothing),
        lambda: outpost.prepare("run-1", "", "site-0", [], ""),
        lambda: outpost.handle("run-1", 1, "fit", [0, 0, 1], nothing, nothing),
        lambda: outpost.finish(nothing, nothing),
        lambda: outpost.compare(nothing, nothing),
        outpost.alone,
        lambda: outpost.keep("0-0"),
        lambda: outpost.restore("0-0"),
        lambda: outpost.snapshot([0, 0, 1]),
    )
    published = [name for name, one in vars(nvflare.Outpost).items() if is_publish(one)]
    try:
        for caller, refused in (("oslo", True), ("server", False)):
            set_call_context(SimpleNamespace(caller=caller))
            replies = [call() for call in calls]
            said = {str(reply["reason"]) for reply in replies}
            assert ("only the server asks" in said) is refused
            assert len(said) == 1 or not refused
            outpost._gate.doing = "fit"
            assert outpost.ping() == {"doing": "" if refused else "fit"}
    finally:
        set_call_context(None)
    assert len(calls) + len(["ping"]) == len(published), published


@pytest.mark.parametrize("ok", [True, False])
def test_a_site_with_another_version_is_named(ok: bool) -> None:
    from atoll.engines.network import remote  # noqa: PLC0415 - only where it is installed

    class Site:
        """A site's end that has another version."""

        def __call__(self, timeout: float) -> "Site":
            return self

        def prepare(self, **arguments: object) -> dict[str, object]:
            return {"ok": ok, "data": "", "version": "0.0.1"}

    run = resolve(change({"method": "fedavg"}, {}), "test")
    party = remote.Party("basel", "site-0", Site())
    engine = remote.Remote(run, {"site-0": party}, 60.0, 60.0, lambda: None)
    with pytest.raises(ClientFailedError, match=r"basel failed in prepare: it has atoll 0\.0\.1"):
        engine.prepare("run-1", None)


def test_the_coordinator_counts_the_fingerprint_as_the_sites_log_does(tmp_path: Path) -> None:
    from atoll.engines.network import remote  # noqa: PLC0415 - only where it is installed

    log = EgressLog(tmp_path / "egress.jsonl")
    log.disclosure("run-1", "prepare", "the fingerprint of its data", "f" * 64)

    class Site:
        """A site's end that has prepared a run."""

        def __call__(self, timeout: float) -> "Site":
            return self

        def prepare(self, **arguments: object) -> dict[str, object]:
            return {"ok": True, "data": "f" * 64}

    run = resolve(change({"method": "fedavg"}, {}), "test")
    party = remote.Party("basel", "site-0", Site())
    engine = remote.Remote(run, {"site-0": party}, 60.0, 60.0, lambda: None)
    engine.prepare("run-1", None)
    assert party.received == log.total("run-1") == 64


def test_a_site_that_fails_is_told_with_the_folder_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.cli import network  # noqa: PLC0415
    from atoll.engines.network import coordinator  # noqa: PLC0415

    def failed(*arguments: object) -> None:
        raise ClientFailedError("bern", "fit", "refused there")

    init(project(tmp_path, "basel"), tmp_path / "kits")
    monkeypatch.setattr(coordinator, "serve", failed)
    todo = [(resolve(change({"method": "fedavg"}, {}), "test"), tmp_path / "run")]
    with pytest.raises(ClientFailedError) as caught:
        network._serve(tmp_path / "kits" / "coordinator", todo, coordinator.Terms(), False, True)
    assert caught.value.__notes__ == [str(tmp_path / "run")]
