#!/bin/sh
# The image's verbs: each is the command of the same name outside a container.
case "$1" in
    continual | instruct) verb=$1; shift; exec "launch/$verb.sh" "$@" ;;
    data_prep | pipeline | eval) verb=$1; shift; exec python -m "$verb" "$@" ;;
    quickstart) exec python launch/quickstart.py ;;
    "" | help)
        echo "usage: continual RECIPE [key=value ...] | instruct RECIPE [key=value ...] | data_prep ... | pipeline ... | eval ... | quickstart"
        exit 2 ;;
    *) exec "$@" ;;
esac
