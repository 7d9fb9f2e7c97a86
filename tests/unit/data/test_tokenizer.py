from types import SimpleNamespace

import pytest

from nemo_offload_rl.data.problem import DataError
from nemo_offload_rl.data.tokenizer import arithmetic_tokenizer, check_stop_strings, check_token_ids, load_tokenizer


def test_the_arithmetic_tokenizer_has_one_token_a_character_and_survives_saving(tmp_path):
    arithmetic_tokenizer().save_pretrained(tmp_path)
    for tokenizer in (load_tokenizer("arithmetic"), load_tokenizer(str(tmp_path))):
        assert tokenizer("07+85=", add_special_tokens=False)["input_ids"] == [0, 7, 10, 8, 5, 11]
        assert tokenizer.decode([0, 9, 2]) == "092"
        assert tokenizer.batch_decode([[0, 9, 2, 12], []], skip_special_tokens=True) == ["092", ""]
        assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (14, 12, 13)
        assert tokenizer.chat_template is None
    assert load_tokenizer(str(tmp_path), chat_template="{{ messages }}").chat_template == "{{ messages }}"
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "unpadded")
    assert load_tokenizer(str(tmp_path / "unpadded")).pad_token_id == 12  # its end


def test_a_folder_without_a_tokenizer_is_one_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"policy\.tokenizer\.name: no tokenizer could be loaded"):
        load_tokenizer(str(tmp_path))


def test_stop_strings_are_of_the_tokenizers_words():
    tokenizer, key = load_tokenizer("arithmetic"), "policy.generation.stop_strings"
    check_stop_strings(tokenizer, ["1+", "<eos>"], key)
    with pytest.raises(DataError, match=r"stop_strings has '2\\n', in which '\\n' is no token"):
        check_stop_strings(tokenizer, ["1", "2\n"], key)
    in_python = SimpleNamespace()
    check_stop_strings(in_python, [], key)
    with pytest.raises(DataError, match=r"stop_strings needs a fast tokenizer, but .* is a SimpleNamespace"):
        check_stop_strings(in_python, ["1"], key)


def test_token_ids_outside_the_vocabulary_are_refused():
    tokenizer = load_tokenizer("arithmetic")
    check_token_ids(tokenizer, [0, 13], "policy.generation.stop_token_ids")
    with pytest.raises(DataError, match=r"stop_token_ids has 14, which is no token"):
        check_token_ids(tokenizer, [12, 14], "policy.generation.stop_token_ids")
