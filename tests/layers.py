#!/usr/bin/env python3
"""Includes and calls point only downwards, between folders and between the files of a folder.

usage: layers.py REPOSITORY [ARCHIVE.a or OBJECT.o ...]

Folders: fusefs and connector use iouring and codec, iouring and cuda use codec; connector and fusefs know nothing of
each other. Only fusefs knows libfuse, only iouring liburing.

Files of a folder: its CMakeLists.txt lists the sources from the lowest to the highest, and a source calls and includes
only what is listed above it, so that its lines read like the floors of a house. Calls are what nm finds in archives and
objects: those that need a symbol, and the one that defines it. Headers do not include one another in a circle, and
Python modules do not import one another in one.
"""

import ast
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
UPWARD = {  # what a source or header may include of a higher source: all of it is types, constants or tables
    # What cgtool's commands share, and its table of them.
    *(("codec", f"cgtool_{name}", "cgtool") for name in ("decode", "encode", "file", "info", "output", "verify")),
    # Kernels are listed first, because they are compiled once per instruction set; kernels.c is their table.
    *(("codec", f"klt_{name}_kernels", "kernels") for name in ("forward", "integer", "inverse")),
    ("codec", "kernels", "geometry"),
    ("codec", "rans_kernels", "rans"),
    # Structs that are held, or pointed to.
    ("codec", "block_order", "profile"),
    ("iouring", "io_buffer", "io"),
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


def circles(used):
    """Of {name: names that it uses}: each circle, from its least name back to that."""
    def circle(name, path):
        if name in path:
            return (*path[path.index(name) :], name)
        return next(filter(None, (circle(other, (*path, name)) for other in used.get(name, ()))), None)

    for name in used:
        found = circle(name, ())
        if found and found[0] == min(found):
            yield " -> ".join(found)


def header_errors(folder, includes):
    used = {
        name: [os.path.basename(path) for quote, path in lines if quote == '"' and path.split("/")[0] == folder]
        for name, lines in includes.items()
        if name.endswith((".h", ".cuh"))
    }
    for circle in circles(used):
        yield f"{folder}: headers in a circle: {circle}"


def python_errors(repository):
    """Modules of the connector's plugin and tools that import one another in a circle."""
    paths = {}
    for where, _, names in os.walk(os.path.join(repository, "connector/cachegen")):
        for name in names:
            if name.endswith(".py"):
                path = os.path.relpath(os.path.join(where, name), os.path.join(repository, "connector"))
                paths[re.sub(r"(/__init__)?\.py$", "", path).replace("/", ".")] = path
    used = {}
    for module, path in paths.items():
        with open(os.path.join(repository, "connector", path), encoding="utf-8") as file:
            tree = ast.parse(file.read())
        package = module.split(".") if path.endswith("__init__.py") else module.split(".")[:-1]
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                named = [f"{base}.{alias.name}" for alias in node.names]
                found.update(named if all(name in paths for name in named) else [base, *named])
        used[module] = sorted(name for name in found if name in paths and name != module)
    for circle in circles(used):
        yield f"connector: modules in a circle: {circle}"


def unlisted(folder, includes, modules):
    for name in includes:
        if name.endswith((".c", ".cu")) and name.rsplit(".", 1)[0] not in modules:
            yield f"{folder}/{name} is not in {folder}/CMakeLists.txt"


def include_errors(folder, includes, modules):
    """Includes of a header whose source stands higher. (What has no source stands nowhere.)"""
    floor = {name: i for i, name in enumerate(modules)}
    for name, lines in includes.items():
        module = name.rsplit(".", 1)[0]
        for quote, path in lines:
            other = os.path.basename(path).rsplit(".", 1)[0]
            if quote != '"' or path.split("/")[0] != folder or (folder, module, other) in UPWARD:
                continue
            if floor.get(other, -1) > floor.get(module, len(modules)):
                yield f'{folder}/{name} includes "{path}", which stands higher in {folder}/CMakeLists.txt'


def calls_of(binaries):
    """{(folder, module): {module of that folder that it calls: a symbol}}.

    Binaries are archives with objects NAME.c.o, or several of one name, and such objects. Each lies in the build's
    folder of that name.
    """
    defined, needed = {}, []
    for binary in binaries:
        folder = next(name for name in reversed(os.path.dirname(binary).split(os.sep)) if name in FOLDERS)
        lines = subprocess.run(["nm", "-A", binary], capture_output=True, text=True, check=True).stdout.splitlines()
        for line in lines:
            match = re.search(r"[:/](\w+)\.cu?\.o:\s*[0-9a-f]*\s+([A-Za-z])\s+((?:cg|CG|cachegen)_\w+)$", line)
            if match is None:
                continue
            module, kind, symbol = match.groups()
            if kind == "U":
                needed.append((folder, module, symbol))
            elif kind in "TDBR":
                defined[folder, symbol] = module
    calls = {}
    for folder, module, symbol in needed:
        other = defined.get((folder, symbol), module)
        if other != module:
            calls.setdefault((folder, module), {}).setdefault(other, symbol)
    return calls


def call_errors(folder, modules, calls):
    floor = {name: i for i, name in enumerate(modules)}
    for module in modules:
        for other, symbol in calls.get((folder, module), {}).items():
            if floor.get(other, -1) > floor[module] and (folder, module, other) not in TABLES:
                yield f"{folder}/{module}.c uses {symbol} of {other}.c, which stands higher in {folder}/CMakeLists.txt"


def main(repository, binaries):
    errors, calls = [], calls_of(binaries)
    for folder in FOLDERS:
        includes, modules = includes_of(repository, folder), listed_modules(repository, folder)
        errors += folder_errors(folder, includes)
        errors += header_errors(folder, includes)
        errors += unlisted(folder, includes, modules)
        errors += include_errors(folder, includes, modules)
        errors += call_errors(folder, modules, calls)
    errors += python_errors(repository)
    for error in dict.fromkeys(errors):
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
