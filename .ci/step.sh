# Sourced by the scripts of this folder.

# Runs a command and prints how long it took.
step() {
    local start=$SECONDS
    printf '\n== %s\n' "$*"
    "$@"
    printf '== took %ss\n' "$((SECONDS - start))"
}
