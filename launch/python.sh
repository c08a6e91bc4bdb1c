#!/bin/sh
# Run a script with the Python on PATH, or say that there is none.
command -v python > /dev/null || {
    echo "error: no python on PATH: run make setup, which makes .venv, or activate an environment that has emo" >&2
    exit 2
}
exec python "$@"
