"""The files that packages, sites and readers of the repository rely on, read as text."""

import re
import tomllib
from pathlib import Path

from atoll.core import VERSION

ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text()


def pages_of_the_site() -> set[str]:
    """The pages of all tables of contents in docs/index.md, as paths from the root."""
    trees = re.findall(r"^:::\{toctree\}\n(.*?)^:::$", read("docs/index.md"), re.DOTALL | re.M)
    pages = set()
    for line in "\n".join(trees).splitlines():
        if not line or line.startswith(":"):
            continue
        name = re.sub(r".* <(.+)>$", r"\1", line)
        page = (ROOT / "docs" / f"{name}.md").resolve()
        pages.add(str(page.relative_to(ROOT)))
    return pages


def test_the_site_has_every_page_once_and_no_others() -> None:
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages = {str(file.relative_to(ROOT)) for file in files}
    generated = {f"docs/reference/{name}.md" for name in ("api", "options", "events", "messages")}
    assert pages_of_the_site() == (pages | generated) - {"docs/index.md"}
    names = re.findall(r"^(?:.* <)?([\w./-]+)>?$", read("docs/index.md"), re.M)
    assert len(names) == len(set(names))


def test_the_citation_and_the_changelog_name_the_version() -> None:
    assert f"\nversion: {VERSION}\n" in read("CITATION.cff")
    assert re.search(r"^## (\S+), ", read("CHANGELOG.md"), re.M)[1] == VERSION  # type: ignore[index]


def test_the_citation_has_the_license_and_the_keywords_of_the_package() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    citation = read("CITATION.cff")
    assert f"\nlicense: {project['license']}\n" in citation
    assert re.findall(r"^  - (?!name:)(.+)$", citation, re.M) == project["keywords"]


def test_the_security_page_leads_to_the_threat_model() -> None:
    assert "](docs/network.md#threat-model)" in read("SECURITY.md")


def locked() -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package in the lock file."""
    text = re.sub(r"^ *#.*\n", "", read("requirements.lock"), flags=re.M).replace("\\\n", " ")
    packages = {}
    for line in text.splitlines():
        name, version = re.match(r"([\w.-]+)==(\S+)", line).groups()  # type: ignore[union-attr]
        assert name not in packages, line
        packages[name] = (version, re.findall(r"--hash=(\S+)", line))
    return packages


def normal(name: str) -> str:
    """The name of a package as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    """The versions of constraints.txt."""
    pairs = [line.split("==") for line in read("constraints.txt").splitlines()]
    return {normal(name): version for name, version in pairs}


def test_the_lock_file_has_hashes_and_no_local_version() -> None:
    for name, (version, hashes) in locked().items():
        assert re.fullmatch(r"[\w.]+", version), f"{name}=={version}: a local version has a +"
        assert hashes, name
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", hash) for hash in hashes), name


def test_the_lock_file_agrees_with_the_constraints() -> None:
    pins = pinned()
    for name, (version, _) in locked().items():
        assert pins.get(name, version) == version, name


def test_the_lock_file_has_every_package_that_a_site_needs() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    packages = locked()
    for requirement in [*project["dependencies"], *extras["nvflare"], *extras["psi"]]:
        assert normal(re.split("[<>=]", requirement)[0]) in packages, requirement


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Containerfile with their arguments."""
    text = re.sub(r"^#.*\n", "", read("Containerfile"), flags=re.M).replace("\\\n", " ")
    pairs = [line.split(maxsplit=1) for line in text.splitlines() if line]
    return [(verb, argument) for verb, argument in pairs]


def test_the_containerfile_pins_its_base_and_adds_nothing_from_the_network() -> None:
    steps = instructions()
    defaults = dict(argument.split("=") for verb, argument in steps if verb == "ARG")
    assert re.match(r"\d+\.\d+", defaults["PYTHON"])
    assert defaults["DEVICE"] == "cpu"
    for verb, argument in steps:
        assert verb != "ADD", argument
        assert verb != "FROM" or argument.split()[0].endswith(":${PYTHON}"), argument
        assert "latest" not in argument
        assert not re.search(r"\b(curl|wget|sudo)\b", argument), argument


def test_the_containerfile_ends_as_an_unprivileged_user() -> None:
    steps = instructions()
    users = [argument for verb, argument in steps if verb == "USER"]
    assert users == ["10001:10001"]
    after = [verb for verb, _ in steps[steps.index(("USER", users[0])) + 1 :]]
    assert after == ["ENTRYPOINT", "CMD"]
    assert ("ENTRYPOINT", '["atoll"]') in steps


def test_the_containerfile_copies_what_is_there_and_installs_the_torch_of_the_constraints() -> None:
    for verb, argument in instructions():
        if verb == "COPY" and "--from" not in argument:
            for path in argument.split()[:-1]:
                assert (ROOT / path).exists(), path
    assert f"torch=={pinned()['torch']} " in read("Containerfile")
