#!/usr/bin/env bash
# aarch64.sh [--install] [TEST ARGUMENTS]: the CPU device's tests on aarch64; on another machine cross-compiled and run under
# QEMU. `--install` first fetches what is missing: the target's standard library by rustup; compiler and emulator by apt-get,
# as root. An emulated run may take BLOCKLOCK_AARCH64_LIMIT seconds (3600); one that takes longer is tried once more, since
# emulators hang at times, and fails the second time.
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
cc=aarch64-linux-gnu-gcc

not_run() {
    echo "not run: the CPU device on aarch64 ($1)"
    exit 0
}
have() { command -v "$1" >/dev/null; }
emulator() { command -v qemu-aarch64 || command -v qemu-aarch64-static; }
std_here() { [ -d "$(rustc --print target-libdir --target $target)" ]; }

install=
if [ "${1:-}" = --install ]; then
    install=yes
    shift
fi
if [ "$(uname -sm)" = "Linux aarch64" ]; then
    exec cargo test --locked -p device --lib -- "${@:-cpu::}"
fi

if [ -n "$install" ]; then
    std_here || timeout 120 rustup target add $target || true
    if ! { have $cc && emulator >/dev/null; }; then
        { timeout 120 apt-get update && timeout 600 apt-get install -y --no-install-recommends \
            gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static; } >/dev/null || true
    fi
fi
std_here || not_run "no standard library for it: rustup target add $target"
have $cc || not_run "no $cc: in Debian's gcc-aarch64-linux-gnu"
loader=$($cc -print-file-name=ld-linux-aarch64.so.1)
[ -e "$loader" ] || not_run "no C library: in Debian's libc6-dev-arm64-cross"
qemu=$(emulator) || not_run "no qemu-aarch64: in Debian's qemu-user-static"

QEMU_LD_PREFIX=$(realpath "$(dirname "$loader")/..") # where the emulated program finds its libraries
export QEMU_LD_PREFIX
export CC_aarch64_unknown_linux_gnu=$cc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$cc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="timeout -k 10 ${BLOCKLOCK_AARCH64_LIMIT:-3600} $qemu"
tests() { cargo test --locked -p device --lib --target $target -- "${@:-cpu::}"; }
status=0
tests "$@" || status=$?
if [ $status = 124 ]; then # by timeout
    echo "the emulated tests did not end in ${BLOCKLOCK_AARCH64_LIMIT:-3600} s: once more"
    status=0
    tests "$@" || status=$?
fi
exit $status
