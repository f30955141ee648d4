"""Keys, requests, certificates, and TLS that looks at what they are for; no process is started."""

import json
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli import app
from atoll.core.errors import UserError
from atoll.engines.network.kits import Kit, init, renew
from atoll.engines.network.site import _Outside, reachable
from atoll.engines.network.tls import PASSPHRASE, client_context, server_context

pytest.importorskip("nvflare", reason="needs the extra nvflare")
x509 = pytest.importorskip("cryptography.x509", reason="comes with NVFlare")
SECRET = "correct horse battery staple"


@pytest.fixture(autouse=True)
def open_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSPHRASE, raising=False)


@pytest.fixture(scope="module")
def signer() -> Any:
    from atoll.engines.network.certificates import Signer  # noqa: PLC0415 - only where it is

    return Signer.new("alps", 3600)


def written(folder: Path, signer: Any, name: str, host: str = "", plain: bool = False) -> list[str]:
    """The files of a party: the authority, its certificate and its key."""
    from atoll.engines.network.certificates import key_pem, new_key  # noqa: PLC0415

    key = new_key()
    content = signer.sign(name, key.public_key(), host)
    if plain:
        content = without_purpose(content, signer)
    files = {"root": signer.pem, "crt": content, "key": key_pem(key)}
    paths = {end: folder / f"{name}.{end}" for end in files}
    for end, path in paths.items():
        path.write_bytes(files[end])
    return [str(path) for path in paths.values()]


def without_purpose(content: bytes, signer: Any) -> bytes:
    """The same certificate as kits had it before: it does not say what it is for."""
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415

    old, now = x509.load_pem_x509_certificate(content), datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(old.issuer)
        .public_key(old.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=100))
    )
    for one in old.extensions:
        if isinstance(one.value, x509.SubjectAlternativeName):
            made = made.add_extension(one.value, one.critical)
    found: bytes = made.sign(signer.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return found


def greeted(site: list[str], coordinator: list[str], host: str) -> tuple[str, str]:
    """What a site and a coordinator say of each other's certificates; empty where nothing."""
    ends, said = socket.socketpair(), {"site": "", "coordinator": ""}
    contexts = {
        "site": client_context(site[0], (site[1], site[2]), host, lambda line: None, ""),
        "coordinator": server_context(
            coordinator[0], (coordinator[1], coordinator[2]), lambda line: None, ""
        ),
    }

    def speak(name: str, end: socket.socket) -> None:
        end.settimeout(5)
        try:
            with contexts[name].wrap_socket(end, server_side=name == "coordinator") as secure:
                secure.sendall(b"x")
                secure.recv(1)
        except ssl.SSLCertVerificationError as error:
            said[name] = error.verify_message
        except OSError:
            pass

    other = threading.Thread(target=speak, args=("coordinator", ends[1]))
    other.start()
    speak("site", ends[0])
    other.join()
    return said["site"], said["coordinator"]


@pytest.mark.parametrize("host", ["localhost", "fl.example.org", "127.0.0.1", "::1"])
def test_a_site_and_its_coordinator_take_each_other(host: str, tmp_path: Path, signer: Any) -> None:
    site, coordinator = written(tmp_path, signer, "bern"), written(tmp_path, signer, "c", host)
    assert greeted(site, coordinator, host) == ("", "")


@pytest.mark.parametrize("host", ["example.org", "127.0.0.2", "::2"])
def test_a_coordinator_of_another_host_is_refused(host: str, tmp_path: Path, signer: Any) -> None:
    site = written(tmp_path, signer, "bern")
    coordinator = written(tmp_path, signer, "c", "fl.example.org")
    assert "mismatch" in greeted(site, coordinator, host)[0]


def test_no_certificate_is_taken_for_what_it_is_not_for(tmp_path: Path, signer: Any) -> None:
    """M4: one site's certificate was accepted as the coordinator."""
    bern, zug = written(tmp_path, signer, "bern"), written(tmp_path, signer, "zug")
    named = written(tmp_path, signer, "localhost")  # a site that is called as the host is
    coordinator = written(tmp_path, signer, "c", "localhost")
    for false in (zug, named):
        assert "purpose" in greeted(bern, false, "localhost")[0]
    assert "purpose" in greeted(coordinator, coordinator, "localhost")[1]


def test_a_certificate_that_does_not_say_what_it_is_for_is_refused(
    tmp_path: Path, signer: Any
) -> None:
    bern, coordinator = written(tmp_path, signer, "bern"), written(tmp_path, signer, "c", "h")
    old_bern = written(tmp_path, signer, "old", plain=True)
    old_coordinator = written(tmp_path, signer, "oc", "h", plain=True)
    words = "the certificate does not say what it is for, not for a"
    assert greeted(bern, old_coordinator, "h")[0] == f"{words} server"
    assert greeted(old_bern, coordinator, "h")[1] == f"{words} client"


def project(folder: Path, *sites: str, **further: Any) -> Path:
    path = folder / "project.toml"
    values = {"name": "alps", "port": 8102, "sites": list(sites), **further}
    path.write_text("".join(f"{key} = {json.dumps(one)}\n" for key, one in values.items()))
    return path


def test_a_kit_of_before_is_said_with_the_remedy(tmp_path: Path) -> None:
    from atoll.engines.network.certificates import Signer  # noqa: PLC0415

    about, out = project(tmp_path, "basel"), tmp_path / "kits"
    init(about, out)
    body = json.loads((out / "authority/alps/state/cert.json").read_text())
    signer = Signer.read(body["root_cert"], body["root_pri_key"])
    for name, file in (("basel", "client.crt"), ("coordinator", "server.crt")):
        path = out / name / "startup" / file
        path.write_bytes(without_purpose(path.read_bytes(), signer))
        with pytest.raises(UserError, match=f"of {name} does not say that it is for a") as caught:
            Kit(out / name).check()
        assert caught.value.remedy.endswith(f"atoll network renew project.toml {name}")
        renew(about, out, name)
        assert Kit(out / name).check() == ""


def sent(folder: Path) -> dict[str, bytes]:
    """What travels between a site and the owner."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("secret", ["", SECRET])
def test_a_private_key_never_travels(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte that goes both ways is read; the site's key is in its own folder alone."""
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    from atoll.engines.network.signing import install, request, sign  # noqa: PLC0415

    owner, site, post = tmp_path / "owner", tmp_path / "site" / "basel", tmp_path / "post"
    for folder in (owner, site.parent, post):
        folder.mkdir()
    about = project(owner, "basel", "bern", server="fl.example.org")
    assert init(about, owner / "kits", by_request=True)["awaited"] == ["basel", "bern"]
    monkeypatch.setenv(PASSPHRASE, secret)
    asked, fingerprint = request("basel", site)
    (post / "there").write_bytes(asked.read_bytes())
    signed, seen, authority = sign(about, post / "there", owner / "kits")
    (post / "back").write_bytes(signed.read_bytes())
    kit = install(site, post / "back")
    assert kit.check() == ""
    assert fingerprint == seen == kit.fingerprint
    assert authority == kit.authority == Kit(owner / "kits" / "coordinator").authority
    content = (site / "startup" / "client.key").read_bytes()
    key: Any = serialization.load_pem_private_key(content, secret.encode() or None)
    number = key.private_numbers().d
    forms = [number.to_bytes(256, "big"), b"PRIVATE KEY", str(number).encode()]
    for place in (post, owner):
        for path in (one for one in place.rglob("*") if one.is_file()):
            content = path.read_bytes()
            if "authority" not in path.parts and "coordinator" not in path.parts:
                assert not any(form in content for form in forms), path
            assert forms[0] not in content
    assert set(sent(post)) == {"there", "back"}
    assert (site / "startup" / "client.key").stat().st_mode & 0o077 == 0
    assert (b"ENCRYPTED" in (site / "startup" / "client.key").read_bytes()) is bool(secret)


def test_a_kit_that_is_not_installed_yet_names_the_next_step(tmp_path: Path) -> None:
    from atoll.engines.network.signing import request  # noqa: PLC0415

    site = tmp_path / "basel"
    asked, _ = request("basel", site)
    for look in (Kit(site).check, lambda: Kit(site).name, lambda: Kit(site).until):
        with pytest.raises(UserError, match="a key, but no certificate yet") as caught:
            look()
        install = f"atoll network install {site} basel.signed.json"
        assert caught.value.remedy == f"send {asked} to the project's owner, then {install}"
    with pytest.raises(UserError, match="not a party's folder"):
        Kit(tmp_path).check()


def test_a_second_install_says_how_to_draft_a_contract_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about, run = project(tmp_path, "basel"), tmp_path / "run.toml"
    run.write_text('data = "wine"\nmethod = "fedavg"\n')
    monkeypatch.chdir(tmp_path)

    def called(*words: str) -> str:
        ended = CliRunner().invoke(app, ["network", *words])
        assert ended.exit_code == 0, ended.output
        return ended.output

    called("init", str(about), "--by-request")
    called("request", "basel")
    called("sign", str(about), "basel/basel.csr")
    install = ("install", "basel", "kits/basel.signed.json", "--run", str(run))
    assert "is kept" not in called(*install)
    again = called(*install)
    assert "site.toml exists and is kept: --run was not used" in again
    assert "move site.toml away and install once more" in again
    (tmp_path / "basel" / "site.toml").unlink()
    assert "is kept" not in called(*install)


def test_what_cannot_be_signed_is_said(tmp_path: Path) -> None:
    from atoll.engines.network.signing import request, sign  # noqa: PLC0415

    about, out = project(tmp_path, "basel"), tmp_path / "kits"
    init(about, out, by_request=True)
    asked, _ = request("basel", tmp_path / "one")
    other, _ = request("basel", tmp_path / "two")
    stranger, _ = request("oslo", tmp_path / "three")
    sign(about, asked, out)
    sign(about, asked, out)  # again: a new certificate for the same key
    with pytest.raises(UserError, match="site basel has another key already"):
        sign(about, other, out)
    sign(about, other, out, replace=True)
    with pytest.raises(UserError, match="no site 'oslo' in the project"):
        sign(about, stranger, out)
    with pytest.raises(UserError, match="there is a private key already"):
        request("basel", tmp_path / "one")
    with pytest.raises(UserError, match="nothing can be called"):
        request("../basel", tmp_path / "four")
    damaged = asked.with_name("damaged.csr")
    for content in (b"", b"nothing", b"x" * 100_000, (out / "basel.signed.json").read_bytes()):
        damaged.write_bytes(content)
        with pytest.raises(UserError, match=r"not a certificate request|more than 65,536 bytes"):
            sign(about, damaged, out)
    with pytest.raises(UserError, match="has made its own key") as caught:
        renew(about, out, "basel")
    assert "sign its request again" in caught.value.remedy
    assert init(about, out) == {"new": [], "awaited": [], "revoked": []}


def test_an_answer_that_is_not_for_this_site_is_refused(tmp_path: Path) -> None:
    from atoll.engines.network.signing import install, request, sign  # noqa: PLC0415

    about, out = project(tmp_path, "basel"), tmp_path / "kits"
    init(about, out, by_request=True)
    one, two = tmp_path / "one", tmp_path / "two"
    signed, _, _ = sign(about, request("basel", one)[0], out)
    request("basel", two)
    with pytest.raises(UserError, match="the answer is for another key"):
        install(two, signed)
    install(one, signed)
    (one / "site.toml").write_text("# read by a person\n")
    install(one, signed)
    assert (one / "site.toml").read_text() == "# read by a person\n"
    body = json.loads(signed.read_text())
    for change in ({"name": "../x"}, {"server": ""}, {"port": 99_999}, {"port": "x"}, {"more": 1}):
        signed.write_text(json.dumps({**body, **change}))
        with pytest.raises(UserError):
            install(one, signed)
    elsewhere = tmp_path / "elsewhere"
    init(about, elsewhere, by_request=True)
    signed, _, _ = sign(about, one / "basel.csr", elsewhere)
    with pytest.raises(UserError, match="from another authority"):
        install(one, signed)


def test_a_passphrase_is_asked_for_in_three_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.engines.network.signing import install, request, sign  # noqa: PLC0415

    about, out, site = project(tmp_path, "basel"), tmp_path / "kits", tmp_path / "basel"
    init(about, out, by_request=True)
    monkeypatch.setenv(PASSPHRASE, SECRET)
    signed, _, _ = sign(about, request("basel", site)[0], out)
    kit = install(site, signed)
    assert reachable(kit).startswith("waiting for the coordinator")
    for given, words in (("", "is under a passphrase"), ("wrong", "does not open")):
        monkeypatch.setenv(PASSPHRASE, given)
        with pytest.raises(UserError, match=words) as caught:
            kit.check()
        assert caught.value.where == str(site / "startup" / "client.key")
        assert caught.value.remedy == "give --passphrase, or set ATOLL_PASSPHRASE"
        assert "key and certificate cannot be used" in reachable(kit)


def test_a_site_that_goes_on_being_refused_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.engines.network import site  # noqa: PLC0415

    (tmp_path / "kit.json").write_text('{"name": "bern", "server": "localhost", "port": 8102}')
    told: list[str] = []
    outside = _Outside(Kit(tmp_path), told.append)
    outside.notices.write("refused", "a site of this name is connected already")
    outside.look()
    outside.notices.write("refused", "a site of this name is connected already")
    outside.look()
    words = "the coordinator refuses this site: a site of this name is connected already"
    assert told == [f"bern: {words}"]
    assert outside.words == words
    outside.notices.write("taken", "")
    outside.look()
    assert outside.words == ""
    outside.notices.write("refused", "'bern' is not in the list of sites")
    monkeypatch.setattr(site, "OUTSIDE_SECONDS", -1.0)
    with pytest.raises(UserError, match="not in the list of sites") as caught:
        outside.look()
    assert caught.value.remedy == "ask the project's owner whether this site still takes part"
