"""The page about networks, typed in from top to bottom: every command as it stands there."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.core.errors import EXIT_INTERRUPTED
from atoll.engines.network.process import running

from .federation import Federation, free_port, wait_for

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = pytest.mark.process

PAGE = Path(__file__).parents[2] / "docs" / "network.md"
BLOCK = re.compile(r"<!-- (file: (\S+)|not run: .*?) -->\n```(\w+)\n(.*?)^```$", re.M | re.S)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.close()


def typed(reader: Federation, line: str) -> None:
    words = shlex.split(line)
    if words[:2] == ["atoll", "join"]:  # each in a terminal of its own
        reader.start(*words[1:])
    elif words[0] == "atoll":
        ended = reader.call(*words[1:], seconds=900)
        assert ended.returncode == 0, (line, ended.stdout, ended.stderr[-2000:])
        if words[1] == "serve":
            for process in reader.started:
                process.terminate()  # Ctrl-C in each terminal, before the rehearsal
        if words[1] == "rehearse":
            assert ended.stdout.rstrip().endswith("go")
            assert ended.stdout.count("go   ") == 11, ended.stdout
    else:
        assert subprocess.run(words, cwd=reader.folder, check=False).returncode == 0, line


def read_out(reader: Federation, rehearsing: bool) -> set[str]:
    """Type in the page; the commands that were run."""
    text = PAGE.read_text().replace("port = 8102", f"port = {free_port()}")  # it may be taken here
    done = set()
    for about, name, language, content in BLOCK.findall(text):
        if name:
            (reader.folder / name).write_text(content)
            continue
        ours = language == "sh" and Path(__file__).name in about
        for line in content.splitlines() if ours else ():
            word = line.split()[1]
            if (word == "rehearse") <= rehearsing and (
                word in ("network", "rehearse") or not rehearsing
            ):
                typed(reader, line)
                done.add(word)
    return done


def test_what_the_page_says_works_as_it_is_printed(reader: Federation) -> None:
    assert read_out(reader, False) >= {"network", "join", "serve", "run", "egress"}


@pytest.mark.long
def test_the_rehearsal_of_the_page_says_go(reader: Federation) -> None:
    assert read_out(reader, True) == {"network", "rehearse"}


PROJECT = """\
name = "alps"
server = "localhost"
port = {port}
sites = ["basel", "bern"]
"""
RUN = """\
rounds = 2
data = "digits-table"
scenario = { split = "rows", clients = 2 }
model = { widths = [8] }
method = { name = "fedavg", epochs = 1 }
engine = { mode = "loop", threads = 1 }
"""


def test_a_rehearsal_that_is_ended_leaves_nothing_running(reader: Federation) -> None:
    reader.folder.joinpath("project.toml").write_text(PROJECT.format(port=free_port()))
    reader.folder.joinpath("run.toml").write_text(RUN)
    typed(reader, "atoll network init project.toml --run run.toml")
    rehearsing = reader.start("rehearse", "project.toml", "run.toml", "--out", "rehearsal")
    kits = [reader.folder / "rehearsal" / "kits" / name for name in ("basel", "coordinator")]
    wait_for("both ends", lambda: all(running(str(kit)) for kit in kits), 120)
    rehearsing.terminate()
    rehearsing.communicate(timeout=120)
    assert rehearsing.returncode == EXIT_INTERRUPTED
    wait_for("nothing runs", lambda: not any(running(str(kit)) for kit in kits), 10)


@pytest.mark.long
def test_a_rehearsal_where_sites_made_their_own_keys_says_go(reader: Federation) -> None:
    """The owner has no kits of the sites, so the rehearsal makes its own for localhost."""
    reader.folder.joinpath("project.toml").write_text(PROJECT.format(port=free_port()))
    reader.folder.joinpath("run.toml").write_text(RUN)
    typed(reader, "atoll network init project.toml --by-request")
    for site in ("basel", "bern"):
        typed(reader, f"atoll network request {site}")
        typed(reader, f"atoll network sign project.toml {site}/{site}.csr")
    ended = reader.call("rehearse", "project.toml", "run.toml", seconds=900)
    assert ended.stdout.rstrip().endswith("go"), ended.stdout + ended.stderr[-2000:]
    assert "NO GO" not in ended.stdout
    assert ended.stdout.count("the site has made its own key") == 2
    assert "made for localhost, since sites have their own keys" in ended.stdout
