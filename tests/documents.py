#!/usr/bin/env python3
"""What documents and comments name exists: files, commands, options, configuration keys.

usage: documents.py REPOSITORY

Files are named by their path in the repository, in a document also by the one from its own folder. In the shell
blocks of a document, scripts are files, `python -m` takes modules, and the long options that modules and cmake are
given are in their sources. The table of configuration keys in connector/README.md is that of connector/config.c and the
plugin. Each header says which threads may use it.
"""

import glob
import os
import re
import sys

DOCUMENTS = (
    "README.md",
    "codec/FORMAT.md",
    "fusefs/SEMANTICS.md",
    "connector/README.md",
    "tests/bench/results/README.md",
    "tests/golden/README",
)
SOURCES = (".c", ".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".txt", ".cmake")
FOLDERS = "codec|iouring|cuda|fusefs|connector|tests|configs"
ENDINGS = r"(?:c|h|cc|cu|cuh|md|py|sh|json|cmake|txt|cgp|map|mount|png)"
PATH = re.compile(rf"(?<![\w/.$<>}}-])(?:{FOLDERS})/[\w./-]*\.{ENDINGS}\b")
DOCUMENT = re.compile(r"(?<![\w/.-])[A-Z]{4,}\.md\b")
QUOTED = re.compile(r"`([^`\n]+)`|\]\(([^)\n]+)\)")


def text_of(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def sources(repository):
    for folder in FOLDERS.split("|"):
        for where, _, names in os.walk(os.path.join(repository, folder)):
            for name in names:
                path = os.path.join(where, name)
                if name.endswith(SOURCES) and "/tests/data/" not in path and "/abi1/" not in path:
                    yield path


def named_files(text):
    """Files that a source or document names by their path in the repository, and documents by their name alone."""
    yield from (match.group() for match in PATH.finditer(text))
    yield from (match.group() for match in DOCUMENT.finditer(text))


def file_errors(repository):
    documents = {os.path.basename(name) for name in DOCUMENTS}
    for path in [*sources(repository), *(os.path.join(repository, name) for name in DOCUMENTS)]:
        where = os.path.relpath(path, repository)
        for name in named_files(text_of(path)):
            if name not in documents and not os.path.exists(os.path.join(repository, name)):
                yield f"{where} names {name}, which is not there"


def quoted_errors(repository, document):
    """`path/name.ext` and [..](path), from the document's folder or the repository's root."""
    folder = os.path.dirname(os.path.join(repository, document))
    for quoted, link in QUOTED.findall(text_of(os.path.join(repository, document))):
        name = link or quoted.split()[0]
        if name.startswith("http") or (quoted and not re.fullmatch(rf"(?:\.\./)*(?:{FOLDERS})/[\w./-]*", name)):
            continue
        if not any(glob.glob(os.path.join(base, name)) for base in (repository, folder)):
            yield f"{document} names {name}, which is not there"


def shell_lines(document):
    """The commands of a document's shell blocks, without comments; a line that goes on is one."""
    for block in re.findall(r"```sh\n(.*?)```", document, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"(^|\s)#.*", "", line).strip()
            if line:
                yield line


def module_errors(repository, where, line):
    match = re.search(r"python3? -m (cachegen[\w.]*)(.*)", line)
    if match is None:
        return
    path = os.path.join(repository, "connector", match.group(1).replace(".", "/"))
    if not os.path.exists(path + ".py"):
        yield f"{where} runs the module {match.group(1)}, which is not there"
        return
    known = "".join(text_of(module) for module in glob.glob(os.path.join(repository, "connector/cachegen/*.py")))
    for option in re.findall(r"(--[a-z][\w-]*)", match.group(2)):
        if f'"{option}"' not in known:
            yield f"{where} gives {match.group(1)} {option}, which it does not know"


def command_errors(repository, document):
    text = text_of(os.path.join(repository, document))
    folder = os.path.dirname(document)
    mount_options = text_of(os.path.join(repository, "fusefs/options.c"))
    for line in shell_lines(text):
        where = f"{document} ({line[:40]} ...)"
        inside = "connector" if "cd connector" in line else ""
        for word in re.split(r"[\s()\"';]+", line):
            if re.fullmatch(rf"(?:\.\./)*(?:{FOLDERS})/[\w./*-]+", word):
                places = (os.path.join(repository, base, word) for base in ("", inside, folder))
                if not any(glob.glob(os.path.normpath(place)) for place in places):
                    yield f"{where} names {word}, which is not there"
        yield from module_errors(repository, where, line)
        if line.startswith("cachegenfs /"):
            for options in re.findall(r"-o (\S+)", line):
                for option in options.split(","):
                    name = option.split("=")[0]
                    if f'"{name}' not in mount_options and f" {name}" not in mount_options:
                        yield f"{where} gives cachegenfs {name}, which it does not know"


def key_errors(repository):
    """The table's keys and limits are those that the library's and the plugin's sources have."""
    section = (
        text_of(os.path.join(repository, "connector/README.md")).split("\n## Configuration\n")[1].split("\n## ")[0]
    )
    told, plugin_told, limits = set(), set(), {}
    for names, limit, meaning in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|[^|]*\|([^|]*)\| (.*)", section, re.MULTILINE):
        of = re.findall(r"`(\w+)`", names)
        (plugin_told if meaning.startswith("plugin:") else told).update(of)
        limits |= dict.fromkeys(of, limit.replace(",", "").replace("10^", "1e").strip())
    rules = re.search(r"RULES\[\] = \{(.*?)\n\};", text_of(os.path.join(repository, "connector/config.c")), re.DOTALL)
    known = set(re.findall(r'^    \{"(\w+)"', rules.group(1), re.MULTILINE))
    for name, *ends in re.findall(r'"(\w+)", (?:INTEGER|NUMBER), \S+ \S+ (\S+), (\S+), NULL', rules.group(1)):
        if [*map(float, ends)] != [*map(float, limits.get(name, "").split(" to ") if limits.get(name) else ())]:
            yield f"connector/README.md: {name} may be {ends[0]} to {ends[1]}"
    plugin = glob.glob(os.path.join(repository, "connector/cachegen/vllm/*.py"))
    plugin_known = "".join(text_of(path) for path in plugin)
    if not told or not plugin_told or not known:
        yield "connector/README.md: no table of configuration keys, or connector/config.c has none"
    for name in sorted(told ^ known):
        yield f"the key {name} is in only one of connector/README.md and connector/config.c"
    for name in sorted(name for name in plugin_told if f'"{name}"' not in plugin_known):
        yield f"connector/README.md has the plugin's key {name}, which the plugin does not know"


def thread_errors(repository):
    """Which threads may call it is said at the head of each header."""
    for folder in ("codec", "iouring", "fusefs", "connector", "cuda"):
        for path in sorted(glob.glob(os.path.join(repository, folder, "*.h"))):
            text = text_of(path)
            if "Threads:" not in text:
                yield f"{os.path.relpath(path, repository)} says nothing of threads"


def main(repository):
    errors = [*file_errors(repository), *key_errors(repository), *thread_errors(repository)]
    for document in DOCUMENTS:
        errors += quoted_errors(repository, document)
        errors += command_errors(repository, document)
    for error in dict.fromkeys(errors):
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
