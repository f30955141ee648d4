"""Kits by request: a site makes its own key, the owner signs it, and only public parts travel.

A request goes to the owner, a signed answer comes back: a certificate, the authority's own, and
where the coordinator is. The site writes NVFlare's settings itself: nothing comes that could run.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError
from atoll.core.record import disk_errors, write_whole
from atoll.engines.network.drafts import drafted_file
from atoll.engines.network.kits import (
    ADMIN,
    NAME,
    Kit,
    Project,
    authority,
    fill,
    read_project,
    signed_file,
)
from atoll.engines.network.process import certificates
from atoll.engines.network.tls import passphrase
from atoll.runs.config import RunConfig

__all__ = ["install", "request", "sign"]

FIELDS = {"project", "name", "server", "port", "certificate", "authority"}
MOST_BYTES = 1 << 16  # maximum bytes of a request or of a signed answer


def _content(path: Path) -> bytes:
    with disk_errors(path), path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        what = f"the file has more than {MOST_BYTES:,} bytes"
        raise UserError(what, str(path), "give the file of atoll network request or sign")
    return content


def _key(folder: Path) -> Path:
    return folder / "startup" / "client.key"


def request(name: str, folder: Path) -> tuple[Path, str]:
    """Create a site's key; return the request file for the owner and the key's fingerprint."""
    if not NAME.fullmatch(name):
        remedy = "use the name that the project has: a letter, then letters, digits and -"
        raise UserError(f"nothing can be called '{name}'", "atoll network request", remedy)
    path, keys = _key(folder), certificates()
    if path.exists():
        remedy = f"send {folder / f'{name}.csr'}, or give another --out for a new key"
        raise UserError("there is a private key already", str(path), remedy)
    key = keys.new_key()
    with disk_errors(folder):
        for one in (folder, path.parent):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(keys.key_pem(key, passphrase()))
    path_of_request = folder / f"{name}.csr"
    write_whole(path_of_request, keys.request_pem(name, key))
    return path_of_request, str(keys.fingerprint(key.public_key()))


def sign(
    project: Path, request_path: Path, out: Path, replace: bool = False
) -> tuple[Path, str, str]:
    """Sign a site's request; return the answer file and the fingerprints of site and authority."""
    about, keys = read_project(project), certificates()
    parsed = keys.read_request(_content(request_path), str(request_path))
    name, key = keys.common_name(parsed), parsed.public_key()
    if name not in about.sites:
        remedy = "add it to sites = [...] and use atoll network init, if it may take part"
        raise UserError(f"no site '{name[:80]}' in the project", str(project), remedy)
    _refuse_other(out, name, key, replace)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    signer = authority(about, out).signer
    answer = {
        "project": about.name, "name": name, "server": about.server, "port": about.port,
        "certificate": signer.sign(name, key).decode(), "authority": signer.pem.decode(),
    }  # fmt: skip
    path = signed_file(out, name)
    write_whole(path, json.dumps(answer, indent=1).encode())
    own = keys.fingerprint(signer.certificate.public_key())
    return path, str(keys.fingerprint(key)), str(own)


def _refuse_other(out: Path, name: str, key: Any, replace: bool) -> None:
    """Refuse a second key for one name, unless the owner confirms it."""
    before = signed_file(out, name)
    if replace or (not before.exists() and not (out / name).exists()):
        return
    if before.exists():
        certificate = certificates().read_certificate(
            _answer(before)["certificate"].encode(), str(before)
        )
        if certificate.public_key() == key:
            return
    remedy = "compare the fingerprint with the site by telephone, then give --replace"
    raise UserError(f"site {name} has another key already", str(before), remedy)


def _answer(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(_content(path))
        if not isinstance(fields, dict) or set(fields) != FIELDS:
            raise ValueError("other fields")
        texts = {key: str(fields[key]) for key in FIELDS - {"port"}}
        return {**texts, "port": int(fields["port"])}
    except (ValueError, TypeError) as error:
        remedy = "ask the owner for the file that atoll network sign made"
        raise UserError("not a signed answer", str(path), remedy) from error


def install(folder: Path, signed: Path, run: RunConfig | None = None) -> Kit:
    """Complete a site's folder with the signed answer; keeps an existing contract."""
    answer, where = _answer(signed), str(signed)
    project = _project(answer, where)
    content = {name: answer[name].encode() for name in ("certificate", "authority")}
    certificate = certificates().read_certificate(content["certificate"], where)
    path = _key(folder)
    key = certificates().read_key(_content(path), str(path), passphrase())
    if key.public_key() != certificate.public_key():
        what, remedy = "the answer is for another key", "sign the request of this very folder"
        raise UserError(what, where, remedy)
    root = folder / "startup" / "rootCA.pem"
    if root.exists() and root.read_bytes() != content["authority"]:
        remedy = "call the owner; if all kits are made anew, make a request in a new folder"
        raise UserError("the answer is from another authority", where, remedy)
    _settle(folder, project, answer["name"])
    write_whole(root, content["authority"])
    write_whole(folder / "startup" / "client.crt", content["certificate"])
    if not (folder / "site.toml").exists():
        text = drafted_file(run, f"../{folder.resolve().name}-store")
        (folder / "site.toml").write_text(text, encoding="utf-8")
    kit = Kit(folder)
    kit.check()
    return kit


def _project(answer: dict[str, Any], where: str) -> Project:
    """The project of an answer, checked like a project's file."""
    with tempfile.TemporaryDirectory(prefix="atoll-") as temporary:
        path = Path(temporary) / "project.toml"
        values = {"name": answer["project"], "server": answer["server"], "port": answer["port"],
                  "sites": [answer["name"]]}  # fmt: skip
        path.write_text("".join(f"{key} = {json.dumps(one)}\n" for key, one in values.items()))
        try:
            return read_project(path)
        except UserError as error:
            raise UserError(error.what, where, "ask the owner for another answer") from error


def _settle(folder: Path, project: Project, name: str) -> None:
    """Write NVFlare's settings and our policies, generated locally."""
    with tempfile.TemporaryDirectory(prefix="atoll-") as temporary:
        place = Path(temporary)
        issued = authority(project, place).settings(name, ADMIN)
        part = place / "kit"
        part.mkdir()
        fill(part, issued, project, name)
        with disk_errors(folder):
            shutil.copytree(part, folder, dirs_exist_ok=True)
            for one in (folder, *(folder / sub for sub in ("startup", "local", "transfer"))):
                one.chmod(0o700)
