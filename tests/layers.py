#!/usr/bin/env python3
"""Includes and calls point only downwards, between folders and between the files of a folder.

usage: layers.py REPOSITORY [ARCHIVE.a ...]

Folders: fusefs and connector use iouring and codec, iouring and cuda use codec; connector and fusefs know nothing of
each other. Only fusefs knows libfuse, only iouring liburing.

Files of a folder: its CMakeLists.txt lists the sources from the lowest to the highest, and a source calls only what is
listed above it, so that its lines read like the floors of a house. Calls are what nm finds in the archives: the objects
that need a symbol, and the one that defines it. Headers do not include one another in a circle.
"""

import os
import re
import subprocess
import sys

FOLDERS = {  # folder: the folders that it may include from, and the system headers that it may not
    "codec": (("codec",), r"fuse|liburing|cuda|linux/"),
    "iouring": (("iouring", "codec"), r"fuse|cuda"),
    "cuda": (("cuda", "codec"), r"fuse|liburing"),
    "fusefs": (("fusefs", "iouring", "codec"), r"liburing|cuda"),
    "connector": (("connector", "iouring", "codec"), r"fuse|liburing|cuda"),
}
TABLES = {  # circles that are a table of functions: what picks an implementation, and the implementation
    ("iouring", "io", "io_threads"),
    ("iouring", "io", "io_uring"),
}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]*)[>"]', re.MULTILINE)


def includes_of(repository, folder):
    """{file name: [(quote, path)]} of the sources and headers that lie in a folder itself."""
    found = {}
    for name in sorted(os.listdir(os.path.join(repository, folder))):
        if name.endswith((".c", ".h", ".cu", ".cuh")):
            with open(os.path.join(repository, folder, name), encoding="utf-8") as file:
                found[name] = INCLUDE.findall(file.read())
    return found


def folder_errors(folder, includes):
    allowed, forbidden = FOLDERS[folder]
    for name, lines in includes.items():
        for quote, path in lines:
            if quote == '"' and path.split("/")[0] not in allowed:
                yield f'{folder}/{name} includes "{path}": {folder} may include only from {", ".join(allowed)}'
            if quote == "<" and re.match(forbidden, path):
                yield f"{folder}/{name} includes <{path}>: {folder} may not know it"


def listed_modules(repository, folder):
    """Names of modules, lowest first: in the order in which their sources are first named."""
    with open(os.path.join(repository, folder, "CMakeLists.txt"), encoding="utf-8") as file:
        lines = (line.split("#")[0] for line in file)
        names = [name for line in lines for name in re.findall(r"\b(\w+)\.(?:c|cu)\b", line)]
    return list(dict.fromkeys(names))


def header_errors(folder, includes):
    """Headers that include one another in a circle."""
    used = {
        name: [os.path.basename(path) for quote, path in lines if quote == '"' and path.split("/")[0] == folder]
        for name, lines in includes.items()
        if name.endswith((".h", ".cuh"))
    }

    def circle(name, path):
        if name in path:
            return (*path[path.index(name) :], name)
        return next(filter(None, (circle(other, (*path, name)) for other in used.get(name, ()))), None)

    for name in used:
        found = circle(name, ())
        if found and found[0] == min(found):
            yield f"{folder}: headers in a circle: {' -> '.join(found)}"


def unlisted(folder, includes, modules):
    for name in includes:
        if name.endswith((".c", ".cu")) and name.rsplit(".", 1)[0] not in modules:
            yield f"{folder}/{name} is not in {folder}/CMakeLists.txt"


def calls_of(archives):
    """{module: {module that it calls: a symbol}}; archives hold objects NAME.c.o, or several of one name."""
    defined, needed = {}, []
    for line in subprocess.run(["nm", "-A", *archives], capture_output=True, text=True, check=True).stdout.splitlines():
        match = re.match(r"\S*?[:/](\w+)\.cu?\.o:\s*[0-9a-f]*\s+([A-Za-z])\s+(cg_\w+|cachegen_\w+)$", line)
        if match is None:
            continue
        module, kind, symbol = match.groups()
        if kind == "U":
            needed.append((module, symbol))
        elif kind in "TDBR":
            defined[symbol] = module
    calls = {}
    for module, symbol in needed:
        if defined.get(symbol, module) != module:
            calls.setdefault(module, {}).setdefault(defined[symbol], symbol)
    return calls


def call_errors(folder, modules, calls):
    floor = {name: i for i, name in enumerate(modules)}
    for module in modules:
        for other, symbol in calls.get(module, {}).items():
            if floor.get(other, -1) > floor[module] and (folder, module, other) not in TABLES:
                yield f"{folder}/{module}.c uses {symbol} of {other}.c, which stands higher in {folder}/CMakeLists.txt"


def main(repository, archives):
    errors, calls = [], calls_of(archives) if archives else {}
    for folder in FOLDERS:
        includes, modules = includes_of(repository, folder), listed_modules(repository, folder)
        errors += folder_errors(folder, includes)
        errors += header_errors(folder, includes)
        errors += unlisted(folder, includes, modules)
        errors += call_errors(folder, modules, calls)
    for error in dict.fromkeys(errors):
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
