#!/usr/bin/env bash
# Installs the public clients that tests run against the server: a Python environment of pinned packages (about 1.1 GB, two
# minutes) under the target folder, and a Chromium, from Debian's packages, where this machine has none and lets us. Tests
# that find no client say so and are counted apart.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
asked=crates/cli/tests/clients/requirements.txt
if ! cmp -s "$asked" "$target/clients/installed.txt"; then
    python3 -m venv "$target/clients"
    timeout 1200 "$target/clients/bin/pip" install --quiet --disable-pip-version-check -r "$asked"
    cp "$asked" "$target/clients/installed.txt" # last: it says that all is there
fi
if ! command -v chromium >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y -qq chromium >/dev/null
    else
        echo "no chromium, and no way to install it: tests of the page will not run"
    fi
fi
