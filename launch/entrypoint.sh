#!/bin/sh
# The image's verbs, each a command of the same meaning outside a container; `health` is for its health check.
verbs="prepare | continual | instruct | evaluate | watch | plan | quickstart"
verb=${1:-help}
[ $# -gt 0 ] && shift
case "$verb" in
    prepare) exec python -m emo prepare "$@" ;;
    continual | instruct)
        # What a start does before it writes heartbeats may hang as well.
        [ -z "$PIPELINE_HEARTBEAT" ] || printf '{"doing": "starting", "since": %s}\n' "$(date +%s)" > "$PIPELINE_HEARTBEAT"
        exec "${0%/*}/$verb.sh" "$@" ;;
    evaluate) exec python -m emo eval "$@" ;;
    watch) exec python -m emo watch "$@" ;;
    plan) exec python -m emo plan "$@" ;;
    quickstart) exec python "${0%/*}/quickstart.py" "$@" ;;
    health)
        # Since when the run does what it is doing: starting, loading, a step, saving. No file: this trains nothing.
        since=$(sed -n 's/.*"since": \([0-9]*\).*/\1/p' "$PIPELINE_HEARTBEAT" 2>/dev/null)
        [ -n "$since" ] || exit 0
        idle=$(($(date +%s) - since))
        [ "$idle" -lt "${HANG_SECONDS:-7200}" ] || { echo "no progress for $idle s"; exit 1; } ;;
    help | --help | -h)
        echo "usage: $verbs, each with the arguments of its command; VERB --help shows them"
        echo "any other command: --entrypoint python IMAGE -m emo report ..." ;;
    *)
        echo "error: unknown command $verb; choose from $verbs" >&2
        exit 2 ;;
esac
