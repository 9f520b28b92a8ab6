"""Characters that look like characters of YAML and of names: curly quotes, dashes, spaces, foreign letters.

Word processors and chats insert them. YAML reads them as text, so a pattern with them matches nothing.
"""

import re
import unicodedata

_SIGNS = {
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\u2036\u275d\u275e\u301d\u301e", '"'),
    **dict.fromkeys("\u2018\u2019\u201a\u201b\u2039\u203a\u2032\u2035\u00b4\u275b\u275c", "'"),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2043", "-"),
    **dict.fromkeys("\u2217\u204e\u2731\u22c6", "*"),
    **dict.fromkeys("\u00b7\u2219\u22c5", "."),
    **dict.fromkeys("\u0589\u2236\ua789", ":"),
}
# Cyrillic and Greek letters with the shape of a Latin one
_LETTERS = {
    **dict(zip("аеорсухіјѕһԁԛԝАВЕКМНОРСТУХІЈЅ", "aeopcyxijshdqwABEKMHOPCTYXIJS", strict=True)),
    **dict(zip("οανΑΒΕΖΗΙΚΜΝΟΡΤΥΧ", "oavABEZHIKMNOPTYX", strict=True)),
}

_LATIN = re.compile("[A-Za-z]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_WORD = re.compile(r"\w+")


def find_look_alike(text: str) -> tuple[int, str] | None:
    """Return the position of the first such character and a sentence about it, or None.

    A foreign letter counts only beside Latin ones: names may be in any script.
    """
    for match in _NOT_ASCII.finditer(text):
        character = match[0]
        instead = _SIGNS.get(character) or _find_ascii(character)
        if instead is None and character in _LETTERS and _is_beside_latin(text, match.start()):
            instead = _LETTERS[character]
        if instead is not None:
            return match.start(), _describe(character, instead)
    return None


def _find_ascii(character: str) -> str | None:
    """Return the ASCII form of a character, such as a wide letter; "" for an invisible one; None for others."""
    if unicodedata.category(character) in ("Cf", "Zl", "Zp"):
        return ""
    plain = unicodedata.normalize("NFKC", character)
    return plain if plain.isascii() else None


def _is_beside_latin(text: str, place: int) -> bool:
    word = next(match for match in _WORD.finditer(text) if match.start() <= place < match.end())
    return _LATIN.search(word[0]) is not None


def _describe(character: str, instead: str) -> str:
    named = f"U+{ord(character):04X} ({unicodedata.name(character, 'a control character').lower()})"
    if not instead:
        return f"the character {named} cannot be seen; remove it"
    shown = "a space" if instead == " " else instead
    return f"the character {named} only looks like {shown}; write {shown} in its place"
