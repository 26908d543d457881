#!/usr/bin/env bash
# The whole test suite, saying what it does: format, lints, documentation examples, tests. Tests run under cargo nextest
# where it is installed, else under cargo test. Ends with what could not run on this machine and the runner's summary.
set -uo pipefail
cd "$(dirname "$0")/.."

# Tests on the real model find it where `blocklock pull` keeps it.
model=${BLOCKLOCK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/blocklock}/models/SmolLM2-135M-Instruct.Q4_1.gguf
if [ -z "${BLOCKLOCK_SMOLLM2:-}" ] && [ -f "$model" ]; then export BLOCKLOCK_SMOLLM2=$model; fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=()

step() { # step NAME COMMAND...: runs the command, remembers a failure and goes on
    local name=$1
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    if ! "$@" 2>&1 | tee -a "$log"; then failed+=("$name"); fi
}

step "format" cargo fmt --all --check
step "lints" cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
step "documentation" env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet
step "documentation examples" cargo test --workspace --doc --locked --quiet
if cargo nextest --version >/dev/null 2>&1; then
    step "tests" cargo nextest run --workspace --locked --no-fail-fast --success-output immediate --status-level slow
    summary=$(grep -E '^ +Summary ' "$log" | tail -1)
else
    step "tests" cargo test --workspace --lib --bins --tests --locked --no-fail-fast -- --show-output
    summary=$(grep -E '^test result:' "$log")
fi

printf '\n'
missing=$(grep -oE 'not run: .*' "$log" | sort | uniq -c)
if [ -n "$missing" ]; then
    printf 'not run on this machine, counted apart from the results:\n%s\n' "$missing"
fi
printf 'left to make soak: long cases at full size (the tests counted as skipped or ignored)\n'
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "$(IFS=,; echo "${failed[*]}")"
fi
printf '%s\n' "$summary"
[ ${#failed[@]} -eq 0 ]
