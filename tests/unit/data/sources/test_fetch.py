"""The data folder, downloads, hashes, and names of data sets."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import data
from atoll.core.errors import EXIT_DATA_MISSING, EXIT_USER, UserError
from atoll.data.sources import fetch, images, tabular, text
from atoll.data.sources.fetch import File

CONTENT = b"rows of a table\n"
HASH = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "data"


@pytest.fixture
def origin(tmp_path: Path) -> str:
    (tmp_path / "origin.bin").write_bytes(CONTENT)
    return (tmp_path / "origin.bin").as_uri()


class Short(http.server.BaseHTTPRequestHandler):
    """Promises more bytes than it sends."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def short_address() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Short) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/file"
        server.shutdown()
        thread.join()


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_folder_is_the_variable_else_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path / "here"))
    assert fetch.folder() == tmp_path / "here"
    monkeypatch.delenv("ATOLL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert fetch.folder() == tmp_path / "cache" / "atoll"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.folder() == tmp_path / ".cache" / "atoll"


def test_find_gives_the_first_file_that_is_there(folder: Path) -> None:
    assert fetch.find(["a", "b"]) is None
    folder.mkdir()
    (folder / "b").write_bytes(b"")
    assert fetch.find(["a", "b"]) == folder / "b"


def test_a_download_is_kept_and_not_repeated(folder: Path, origin: str, tmp_path: Path) -> None:
    groups = ((File("tabular/x.bin", HASH, origin),),)
    (path,) = fetch.obtain("x", groups)
    assert path == folder / "tabular" / "x.bin"
    assert path.read_bytes() == CONTENT
    assert leftovers(folder) == ["x.bin"]
    (tmp_path / "origin.bin").unlink()
    assert fetch.obtain("x", groups) == [path]


def test_a_download_with_a_wrong_hash_is_refused_and_not_kept(folder: Path, origin: str) -> None:
    with pytest.raises(UserError, match=f"{HASH}, expected {'0' * 64}") as caught:
        fetch.obtain("x", ((File("x.bin", "0" * 64, origin),),))
    assert caught.value.exit_code == EXIT_DATA_MISSING
    assert leftovers(folder) == []


def test_a_file_with_a_wrong_hash_is_refused_and_both_hashes_named(folder: Path) -> None:
    folder.mkdir()
    (folder / "x.bin").write_bytes(b"other")
    other = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(UserError, match=f"{other}, expected {HASH}"):
        fetch.obtain("x", ((File("x.bin", HASH),),))


def test_without_a_published_hash_the_first_download_is_trusted(folder: Path, origin: str) -> None:
    groups = ((File("x.bin", None, origin),),)
    (path,) = fetch.obtain("x", groups)
    assert (folder / "x.bin.sha256").read_text().split() == [HASH, "x.bin"]
    assert fetch.obtain("x", groups) == [path]
    path.write_bytes(b"changed")
    with pytest.raises(UserError, match="expected " + HASH):
        fetch.obtain("x", groups)


def test_a_damaged_hash_file_is_an_error_that_names_the_file(folder: Path, origin: str) -> None:
    groups = ((File("x.bin", None, origin),),)
    fetch.obtain("x", groups)
    (folder / "x.bin.sha256").write_text("")
    with pytest.raises(UserError, match=r"x\.bin cannot be checked"):
        fetch.obtain("x", groups)


def test_a_file_put_there_by_hand_is_used_without_network(folder: Path) -> None:
    folder.mkdir()
    (folder / "x.bin").write_bytes(CONTENT)
    groups = ((File("x.bin", None, "http://127.0.0.1:9/never"),),)
    assert fetch.obtain("x", groups) == [folder / "x.bin"]


def test_a_later_group_that_is_there_is_used_before_any_download(folder: Path) -> None:
    folder.mkdir()
    (folder / "part.bin").write_bytes(CONTENT)
    whole = File("whole.bin", None, "http://127.0.0.1:9/never")
    assert fetch.obtain("x", ((whole,), (File("part.bin", HASH),))) == [folder / "part.bin"]


def test_only_the_missing_file_of_a_group_is_downloaded(folder: Path, origin: str) -> None:
    folder.mkdir()
    (folder / "a.bin").write_bytes(CONTENT)
    group = (File("a.bin", HASH, "http://127.0.0.1:9/never"), File("b.bin", HASH, origin))
    assert fetch.obtain("x", (group,)) == [folder / "a.bin", folder / "b.bin"]


def test_an_answer_that_ends_early_is_not_kept(folder: Path, short_address: str) -> None:
    with pytest.raises(UserError, match="16 of 1000 bytes") as caught:
        fetch.obtain("x", ((File("x.bin", None, short_address),),))
    assert caught.value.exit_code == EXIT_DATA_MISSING
    assert leftovers(folder) == []


def test_no_network_is_an_error_with_the_file_the_place_and_the_command(folder: Path) -> None:
    url = "http://127.0.0.1:9/x.bin"
    with pytest.raises(UserError) as caught:
        fetch.obtain("x", ((File("tabular/x.bin", None, url),),))
    path = str(folder / "tabular" / "x.bin")
    assert caught.value.exit_code == EXIT_DATA_MISSING
    assert "x.bin" in caught.value.what
    assert path in caught.value.where
    assert url in caught.value.remedy
    assert path in caught.value.remedy


def test_a_set_that_cannot_be_downloaded_says_where_to_put_it(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        fetch.obtain("x", ((File("text/x.parquet", HASH, page="https://example.org"),),))
    assert caught.value.exit_code == EXIT_DATA_MISSING
    assert str(folder) in caught.value.where
    assert "text/x.parquet" in caught.value.remedy
    assert "https://example.org" in caught.value.remedy


def test_a_folder_that_cannot_be_written_is_the_users_to_mend(
    tmp_path: Path, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_bytes(b"a file where the folder should be")
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path / "taken"))
    with pytest.raises(UserError, match=r"cannot keep x\.bin") as caught:
        fetch.obtain("x", ((File("x.bin", HASH, origin),),))
    assert caught.value.exit_code == EXIT_USER


def test_every_name_is_known_once_and_can_be_asked_about(folder: Path) -> None:
    known = data.names()
    assert known == sorted(set(known))
    for name in known:
        assert data.about(name).line.endswith(".")
    for module in (tabular, images, text):
        assert {name.replace("-", "_") for name in module.FILES} <= set(module.__all__)


def test_about_says_whether_a_set_is_here(folder: Path) -> None:
    assert data.about("wine").presence == "embedded"
    assert data.about("covertype").presence == "to be downloaded"
    assert data.about("mnist-m").presence == "not available"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "mnist_m.npz").write_bytes(b"")
    assert data.about("mnist-m").presence == "found"
    assert data.about("mnist-m").where == str(folder / "images" / "mnist_m.npz")
    assert data.about("mnist-m").line.endswith("may be a part of it; a run reports that.")
    assert "a part of it" not in data.about("wine").line


def test_one_of_four_files_is_not_found_yet(folder: Path) -> None:
    (folder / "images" / "mnist").mkdir(parents=True)
    (folder / "images" / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"")
    assert data.about("mnist").presence == "to be downloaded"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'covertype'"):
        data.load("covertyp")
    with pytest.raises(UserError, match="did you mean 'fashion-mnist'"):
        data.about("fashion-mnits")


def test_hyphens_and_underscores_are_the_same() -> None:
    assert data.load("breast_cancer").name == data.load("breast-cancer").name == "breast-cancer"
    assert data.about("breast_cancer").name == "breast-cancer"


def test_options_of_a_set_are_checked() -> None:
    assert len(data.load("synthetic-table", rows=7)) == 7
    with pytest.raises(UserError, match="did you mean 'rows'"):
        data.load("synthetic-table", row=7)
    with pytest.raises(UserError, match="option 'rows' cannot be 0"):
        data.load("synthetic-table", rows=0)
    with pytest.raises(UserError, match="option 'rule'"):
        data.load("synthetic-table", rule="none")
    with pytest.raises(UserError, match="unknown option 'rows'"):
        data.load("wine", rows=3)


def test_every_missing_public_set_ends_with_code_three(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy")
    for variable in ("http_proxy", "https_proxy"):  # nothing listens on port 9: no network is used
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for name in data.names():
        if data.about(name).presence == "embedded":
            continue
        with pytest.raises(UserError) as caught:
            data.load(name)
        assert caught.value.exit_code == EXIT_DATA_MISSING
        assert str(folder) in caught.value.where
        assert caught.value.remedy
