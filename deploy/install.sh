#!/usr/bin/env bash
# Installs headrace on a node of a cluster: the version in the file `version`, from the wheels
# beside it, into `venv` beside it. `ray up` copies all that to each node and calls this there;
# what is there already stays as it is.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
venv=$here/venv
version=$(cat "$here/version")
stamp="$version $(sha256sum <"$here/constraints.txt") ${CMAKE_ARGS:-}"

chmod 600 "$here/keys" ~/.ray/auth_token
if [ "$(cat "$venv/stamp" 2>/dev/null)" != "$stamp" ]; then
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "headrace: $(python3 --version) is too old, it takes 3.11" >&2
        exit 1
    fi
    [ -x "$venv/bin/pip" ] || python3 -m venv "$venv"
    CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$venv/bin/pip" install --quiet \
        --disable-pip-version-check --constraint "$here/constraints.txt" \
        --find-links "$here/wheels" "headrace==$version"
    echo "$stamp" >"$venv/stamp"
fi

# Ray's commands come in login shells, which read this.
line="set -a; . $here/ray.env; set +a; PATH=$venv/bin:\$PATH"
grep -qxF "$line" ~/.bashrc 2>/dev/null || echo "$line" >>~/.bashrc
