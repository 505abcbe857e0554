# Sourced by the scripts beside it: sets $root (the project's folder) and $python (3.11 or newer).

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd) || exit 1

python=
for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "headrace: Python 3.11 or newer is needed, and none is on the PATH (set PYTHON to name one)" >&2
    exit 1
fi
