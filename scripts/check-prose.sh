#!/bin/sh
# Refuses words that CONTRIBUTING.md asks to avoid, in code, comments, documents and scripts.
set -eu
cd "$(dirname "$0")/.."

words='anew|whoever|whomever|whosoever|mended|thereof|therein|hereby|heretofore|for ever|by and by'
# This script and the rules contain the words.
if found=$(git grep -nwiE -e "$words" -- '*.rs' '*.md' '*.toml' '*.sh' '*.lua' '*.service' Makefile \
    ':!CONTRIBUTING.md' ':!scripts/check-prose.sh'); then
    echo "$found"
    echo "check-prose.sh: say these plainly; CONTRIBUTING.md has the rules" >&2
    exit 1
fi

# Long lines of documents, except tables, code, and lines filled by one link. docs/COUNTERS.md is generated.
if found=$(git ls-files '*.md' ':!docs/COUNTERS.md' | xargs perl -CSD -ne '
    $code = !$code if /^\s*```/;
    print "$ARGV:$.: ", length() - 1, " columns\n" if !$code && length() > 101 && !/^\s*[|<]|^#|^ {4}|^\S*$/;
    close ARGV if eof;' | grep .); then
    echo "$found"
    echo "check-prose.sh: wrap these lines at 100 columns" >&2
    exit 1
fi
