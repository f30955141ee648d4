"""The signing authority of a project: NVFlare writes the settings, atoll signs the certificates."""

import json
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from nvflare.lighter import entity, provisioner, utils
from nvflare.lighter.impl import static_file, workspace
from nvflare.lighter.spec import Builder

from atoll.core.errors import UserError
from atoll.core.integrity import damaged, read_json
from atoll.core.record import disk_errors, write_whole
from atoll.engines.network.certificates import Signer, key_pem, new_key

__all__ = ["Authority"]

ROLE = "project_admin"


class _Certificates(Builder):  # type: ignore[misc]
    """Writes keys and certificates for the named parties; the others get only settings."""

    def __init__(self, signer: Signer, names: Iterable[str], server: str) -> None:
        self.signer, self.names, self.server = signer, set(names), server

    def build(self, project: Any, ctx: Any) -> None:
        """Write a key, a certificate and the authority's certificate for each of them."""
        for one in project.get_all_participants():
            if one.name in self.names:
                self._write(one, Path(ctx.get_kit_dir(one)))

    def _write(self, one: Any, folder: Path) -> None:
        kind = "server" if one.type == "server" else "client"
        host = self.server if kind == "server" else ""
        key, role = new_key(), ROLE if one.type == "admin" else ""
        signed = self.signer.sign(one.name, key.public_key(), host, role)
        (folder / f"{kind}.crt").write_bytes(signed)
        path = folder / f"{kind}.key"
        path.touch(mode=0o600)
        path.write_bytes(key_pem(key))
        (folder / "rootCA.pem").write_bytes(self.signer.pem)


@dataclass(frozen=True)
class Authority:
    """The part of a project that signs: makes the folders of all parties."""

    folder: Path  # folder of the authority's own key
    project: str
    server: str  # the name by which sites reach the coordinator
    port: int
    days: int

    @property
    def _state(self) -> Path:
        return self.folder / self.project / "state" / "cert.json"

    @property
    def signer(self) -> Signer:
        """The authority's own key; creates one if there is none yet."""
        path = self._state
        if path.exists():
            error = damaged(path, "put back a copy of the authority's folder")
            read = Signer.read
            return read_json(path, lambda b: read(b["root_cert"], b["root_pri_key"]), error)
        signer = Signer.new(self.project, self.days)
        stored = {"root_cert": signer.pem.decode(), "root_pri_key": key_pem(signer.key).decode()}
        with disk_errors(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
        write_whole(path, json.dumps(stored).encode())
        path.chmod(0o600)
        return signer

    def issue(self, sites: Iterable[str], admin: str, names: Iterable[str]) -> Path:
        """Create a folder for every party, with a new key and certificate for `wanted` parties."""
        return self._provision(sites, admin, [_Certificates(self.signer, names, self.server)])

    def settings(self, site: str, admin: str) -> Path:
        """What NVFlare needs of a site, without any key or certificate."""
        return self._provision([site], admin, [])

    def _provision(self, sites: Iterable[str], admin: str, further: list[Builder]) -> Path:
        party: dict[str, Any] = {"org": "atoll"}
        server = {**party, "name": self.server, "type": "server", "fed_learn_port": self.port}
        people = {**party, "name": admin, "type": "admin", "role": ROLE}
        clients = [{**party, "name": name, "type": "client"} for name in sites]
        static = static_file.StaticFileBuilder(config_folder="config", scheme="tcp")
        maker = provisioner.Provisioner(
            str(self.folder), [workspace.WorkspaceBuilder(), static, *further]
        )
        template = Path(utils.__file__).parent / "templates" / "master_template.yml"
        maker.add_template(utils.load_yaml(str(template)))
        quiet = StringIO()
        try:
            members = [entity.participant_from_dict(one) for one in (server, people, *clients)]
        except ValueError as error:
            remedy = "look at server and sites in the project's file"
            raise UserError(f"NVFlare takes no such party: {error}", self.server, remedy) from error
        with redirect_stdout(quiet), redirect_stderr(quiet):
            result = maker.provision(entity.Project(self.project, "made by atoll", members))
        if result.get("build_error") or not result.get("current_prod_dir"):
            words = quiet.getvalue().strip().splitlines()
            raise UserError(
                "no certificates could be made", str(self.folder), words[-1] if words else "look"
            )
        return Path(str(result["current_prod_dir"]))
