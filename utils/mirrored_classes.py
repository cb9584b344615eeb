"""Finds classes that a mirrored image exchanges, such as ``left arrow`` and ``right arrow``, by their names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# Words, or stems of words, that a flip exchanges: English, Spanish, Portuguese, French, Italian, German and Dutch,
# Danish and Norwegian, Swedish, Polish, Czech, Russian and Ukrainian, Turkish, Chinese and Japanese, Korean,
# Vietnamese, Indonesian, Arabic, Persian.
_EXCHANGED_WORDS = {
    "fliplr": """left right, izquierd derech, esquerd direit, gauche droite, gauche droit, sinistr destr, link recht,
        venstre højre, venstre høyre, vänster höger, lew praw, lev prav, лев прав, лів прав, sol sağ, 左 右, 왼 오른,
        좌 우, trái phải, kiri kanan, يسار يمين, أيسر أيمن, چپ راست""",
    "flipud": """up down, upper lower, top bottom, above below, arriba abajo, superior inferior, cima baixo, haut bas,
        supérieur inférieur, sopra sotto, oben unten, ober unter, omhoog omlaag, boven onder, op ned, upp ner,
        górę dół, górn doln, nahoru dolů, horn doln, вверх вниз, верхн нижн, yukarı aşağı, üst alt, 上 下, 위 아래,
        상 하, lên xuống, atas bawah, فوق تحت, بالا پایین""",
}


def mirrored_classes(names: Sequence[str], flip: str) -> list[tuple[str, str]]:
    """Returns the pairs of ``names`` that differ only by a word that ``flip`` ("fliplr" or "flipud") exchanges.

    Case, accents and separators do not matter: ``Left shoe`` and ``right_shoe`` are a pair. So are ``hand L`` and
    ``hand R``, but not the letters alone.
    """
    exchanged_words = [tuple(map(_folded, pair.split())) for pair in _EXCHANGED_WORDS[flip].split(",")]
    name_of_key = {_key(name): name for name in names}
    pairs = []
    for key, name in name_of_key.items():
        words = [(" l ", " r "), *exchanged_words] if flip == "fliplr" and key != " l " else exchanged_words
        others = [key.replace(one, other) for one, other in words if one in key]
        other = next((other for other in others if other in name_of_key), None)
        if other is not None:
            pairs.append((name, name_of_key[other]))
    return pairs


def _key(name: str) -> str:
    """Returns the words of a name, without case and accents, with a space before and after each."""
    words = re.findall(r"[^\W_]+", _folded(name))
    return f" {' '.join(words)} "


def _folded(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in decomposed if not unicodedata.combining(c))
