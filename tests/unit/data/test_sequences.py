import torch

from nemo_offload_rl.data.batch import response_batch, response_logprobs

PAD = 9


def test_prompts_and_responses_are_padded_on_the_right():
    batch = response_batch([[1, 2], [3]], [[4], [5, 6, 7]], PAD)
    assert batch["input_ids"].tolist() == [[1, 2, 4, 9], [3, 5, 6, 7]]
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_lengths"].tolist() == [3, 4]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]
    assert batch["sample_mask"].tolist() == [1, 1]


def test_a_sample_without_a_response_is_left_out_of_the_loss():
    batch = response_batch([[1, 2], [3]], [[], [5]], PAD)
    assert batch["sample_mask"].tolist() == [0, 1]
    assert batch["token_mask"][0].tolist() == [0, 0]


def test_logprobs_stand_at_their_tokens():
    batch = response_batch([[1, 2], [3]], [[4], [5, 6, 7]], PAD)
    table = response_logprobs(batch, [[-0.5], [-1.0, -2.0, -3.0]])
    assert table.tolist() == [[0, 0, -0.5, 0], [0, -1, -2, -3]]
    assert response_logprobs(response_batch([[1]], [[]], PAD), [[]]).tolist() == [[0]]
