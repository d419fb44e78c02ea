"""What a shell completes beyond options and their words: the names in a file, and scripts in which that works."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_MOST = 1 << 20
"""Bytes of a file that is looked into while somebody waits."""

_ZSH = """
#compdef %(prog_name)s

%(complete_func)s() {
  eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" %(autocomplete_var)s=complete_zsh %(prog_name)s)
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  # The first TAB loads this file: it answers already.
  %(complete_func)s "$@"
else
  compdef %(complete_func)s %(prog_name)s
fi
"""

_BASH = """
%(complete_func)s() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local words=( $line ) typed="${line##* }"
    local place=$(( ${#words[@]} - 1 ))
    [[ -z $typed ]] && place=$(( place + 1 ))
    local IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="$line" COMP_CWORD=$place %(autocomplete_var)s=complete_bash $1 ) )
    # To bash a colon ends a word: what stands before it is there already.
    if [[ $typed == *:* && $COMP_WORDBREAKS == *:* ]]; then
        COMPREPLY=( "${COMPREPLY[@]#"${typed%%"${typed##*:}"}"}" )
    fi
    return 0
}

complete -o default -F %(complete_func)s %(prog_name)s
"""


def improve_scripts() -> None:
    """Have Typer hand out these scripts.

    Its own for zsh completes from the second TAB on, and that for bash knows no word with a colon in it.
    """
    from typer import _completion_shared

    _completion_shared._completion_scripts |= {"zsh": _ZSH, "bash": _BASH}


def names_in_file(incomplete: str) -> list[str]:
    """Return `file.py:Name` for each name in a file that begins as typed; none where no file is named."""
    path, colon, start = incomplete.rpartition(":")
    if not colon or not path.endswith(".py"):
        return []
    try:
        with Path(path).expanduser().open("rb") as file:
            tree = ast.parse(file.read(_MOST))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [f"{path}:{name}" for name in dict.fromkeys(_names(tree)) if name.startswith(start)]


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield what a file defines for others: its classes, functions and variables."""
    for node in tree.body:
        named = [node.name] if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else []
        if isinstance(node, ast.Assign):
            named = [target.id for target in node.targets if isinstance(target, ast.Name)]
        yield from (name for name in named if not name.startswith("_"))
