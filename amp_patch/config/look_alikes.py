"""Finds look-alikes: characters outside ASCII that look like an ASCII character, such as curly quotes, dashes and wide
spaces. Invisible characters count, too.

Word processors and chats insert them. YAML reads nearly all of them as ordinary text. So a name or a pattern that
contains a look-alike usually matches nothing, although it looks right.
"""

import re
import unicodedata

# quotes, dashes, asterisks, dots and colons, each with the ASCII character that it looks like
_PUNCTUATION = {
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\u2036\u275d\u275e\u301d\u301e", '"'),
    **dict.fromkeys("\u2018\u2019\u201a\u201b\u2039\u203a\u2032\u2035\u00b4\u275b\u275c", "'"),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2043", "-"),
    **dict.fromkeys("\u2217\u204e\u2731\u22c6", "*"),
    **dict.fromkeys("\u00b7\u2219\u22c5", "."),
    **dict.fromkeys("\u0589\u2236\ua789", ":"),
}
# Cyrillic letters, then Greek letters, each with the Latin letter of the same shape
_LETTERS = {
    **dict(zip("аеорсухіјѕһԁԛԝАВЕКМНОРСТУХІЈЅ", "aeopcyxijshdqwABEKMHOPCTYXIJS", strict=True)),
    **dict(zip("οανΑΒΕΖΗΙΚΜΝΟΡΤΥΧ", "oavABEZHIKMNOPTYX", strict=True)),
}

# invisible characters that Unicode counts as letters, marks or symbols: fillers, and the variation selectors of emoji
_INVISIBLE = frozenset("\u034f\u115f\u1160\u2800\u3164\uffa0") | frozenset(map(chr, range(0xFE00, 0xFE10)))

_LATIN = re.compile("[A-Za-z]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_WORD = re.compile(r"\w+")


def find_look_alike(text: str) -> tuple[int, str] | None:
    """Return the index of the first look-alike in a text, and the message about it. Return None if there is none.

    A Cyrillic or Greek letter counts only in a word that also has Latin ones: whole names may be in any alphabet.
    """
    for match in _NOT_ASCII.finditer(text):
        character = match[0]
        meant = _PUNCTUATION.get(character) or _find_ascii(character)
        if meant is None and character in _LETTERS and _is_in_latin_word(text, match.start()):
            meant = _LETTERS[character]
        if meant is not None:
            return match.start(), _describe(character, meant)
    return None


def _find_ascii(character: str) -> str | None:
    """Return the ASCII form of a character: "A" for a wide A, "" for an invisible character, None if there is none."""
    # format characters (such as a zero-width space), and the separators of lines and paragraphs
    if unicodedata.category(character) in ("Cf", "Zl", "Zp") or character in _INVISIBLE:
        return ""
    # NFKC replaces wide letters, ligatures and special spaces by the characters that they stand for
    plain = unicodedata.normalize("NFKC", character)
    return plain if plain.isascii() else None


def _is_in_latin_word(text: str, index: int) -> bool:
    """Return whether the word around the letter at `index` has a Latin letter."""
    word = next(match for match in _WORD.finditer(text) if match.start() <= index < match.end())
    return _LATIN.search(word[0]) is not None


def _describe(character: str, meant: str) -> str:
    """Return the message about a look-alike. `meant` is the ASCII form of the character; "" if it is invisible."""
    named = f"U+{ord(character):04X} ({unicodedata.name(character).lower()})"
    if not meant:
        return f"the character {named} cannot be seen; remove it"
    shown = "a space" if meant == " " else meant
    return f"the character {named} only looks like {shown}; write {shown} in its place"
