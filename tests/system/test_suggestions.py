"""Suggestions ("did you mean") give the word that is meant, out of what is allowed at each place and from other words
for it.

Guards: errors, synonyms, config/look_alikes.
"""

import re
import time

from torch import nn

import amp_patch
from amp_patch.config.list_file import BOOLEANS, ENTRY_KEYS, KEYS
from amp_patch.config.module_rules import RUNS
from amp_patch.config.op_namespaces import get_op_names
from amp_patch.config.policy import Policy
from amp_patch.config.presets import Presets
from amp_patch.config.shipped import shipped_names, shipped_presets
from amp_patch.dtypes import DTYPE_WORDS
from amp_patch.errors import did_you_mean, find_meant
from amp_patch.synonyms import SYNONYMS

ALLOWED = {
    "level": Presets(shipped_presets()).names(),
    "op": [name for name in get_op_names() if "." not in name],
    "key": KEYS,
    "entry": ENTRY_KEYS,
    "run": RUNS,
    "true": BOOLEANS,
    "dtype": DTYPE_WORDS,
    "class": [name for name in dir(nn) if isinstance(getattr(nn, name), type)],
    "list": shipped_names(),
    "property": list(Policy.get_overrides()),
    "scale": ("dynamic",),
    "device": ("cuda", "cpu"),
    "public": amp_patch.__all__,
}

MISSPELT = {
    "level": {"o1": "O1", "01": "O1", "2": "O2", "OO4": "O4"},
    "op": {"sofmax": "softmax", "SoftMax": "softmax", "attention": "scaled_dot_product_attention", "dense": "linear"},
    "key": {"whitlist": "whitelist", "allowlist": "whitelist", "sequencepromote": "sequence_promote"},
    "entry": {"reason": "why"},
    "run": {"float16": "low", "fp32": "float32", "flaot32": "float32"},
    "true": {"yes": "true", "True": "true"},
    "dtype": {"bfloat61": "bfloat16", "fp-16": "fp16", "double": "float32"},
    "class": {"Layernorm": "LayerNorm", "BatchNorm": "BatchNorm1d BatchNorm2d BatchNorm3d"},
    "list": {"bf16": "bfloat16", "apx": "apex"},
    "property": {"loss-scale": "loss_scale", "keep_bn_fp32": "keep_batchnorm_fp32"},
    "scale": {"auto": "dynamic"},
    "device": {"gpu": "cuda"},
    "public": {"initialise": "initialize", "master_param": "master_params"},
}


def test_the_word_that_is_meant_is_suggested() -> None:
    wrong = {}
    for place, words in MISSPELT.items():
        for word, meant in words.items():
            told = did_you_mean(word, ALLOWED[place])
            if re.findall(r"'(.+?)'", told) != meant.split():
                wrong[place, word] = told
    assert wrong == {}
    assert did_you_mean("02", ALLOWED["level"]) == " Did you mean 'O2'? The first character is the letter O."


def test_what_is_far_from_all_is_not_guessed_at() -> None:
    for allowed in (*ALLOWED.values(), ()):
        for word in ("xyzzy", "", "\u0661", 1, None, b"O1", ["O1"]):
            assert did_you_mean(word, iter(allowed)) == ""


def test_a_word_that_is_allowed_means_itself_whatever_it_means_elsewhere() -> None:
    for allowed in ALLOWED.values():
        for word in set(allowed) & set(SYNONYMS):
            assert find_meant(word, allowed) == (word,)
            assert did_you_mean(word, allowed) == "", "nobody is told to write what stands there"
            assert did_you_mean(word, allowed, prefix="torch.") == f" Did you mean 'torch.{word}'?"


def test_every_word_of_the_table_leads_to_a_name_of_some_place() -> None:
    known = {name for names in ALLOWED.values() for name in names} | {"opt_level"}
    assert {name for names in SYNONYMS.values() for name in names} - known == set()


def test_suggestions_for_many_and_long_words_take_no_time() -> None:
    letters = "".join(ALLOWED["op"])
    words = [letters[start : start + 12] for start in range(0, 2000, 10)]
    begun = time.process_time()
    for word in words:
        did_you_mean(word, get_op_names())
    assert did_you_mean("softmax" * 2300, get_op_names()) == ""
    assert time.process_time() - begun < 2
