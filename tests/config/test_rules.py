"""A rule is its name, wherever it is printed, compared or looked up."""

import json
import pickle

from amp_patch.config.list_file import RULES, Rule


def test_a_rule_is_its_name() -> None:
    for rule in Rule:
        name = rule.value
        assert rule == name and {name: 1}[rule] == 1
        assert (str(rule), repr(rule), f"{rule}", f"{rule:20}|") == (name, repr(name), name, f"{name:20}|")
        assert json.dumps({rule: [rule]}) == json.dumps({name: [name]})
        assert pickle.loads(pickle.dumps(rule)) is rule is Rule(name)


def test_the_keys_of_a_list_file() -> None:
    assert RULES == ("whitelist", "blacklist", "promote", "sequence_promote", "banned", "neutral")
