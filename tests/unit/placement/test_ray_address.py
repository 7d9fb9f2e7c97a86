import pytest

from nemo_offload_rl.placement.local_ray import join_ray


@pytest.fixture
def joined(monkeypatch):
    """Records the arguments of `ray.init`, which does nothing, and the addresses that are asked for an answer."""
    calls: list[object] = []
    monkeypatch.setattr("ray.init", lambda **options: calls.append(options))
    monkeypatch.setattr(
        "nemo_offload_rl.placement.local_ray.answers_at", lambda host, port, timeout: not calls.append((host, port))
    )
    return calls


@pytest.mark.parametrize(
    ("address", "asked"),
    [("10.0.0.1:6379", ("10.0.0.1", 6379)), ("head:7000", ("head", 7000)), ("[fd00::1]:6379", ("fd00::1", 6379))],
)
def test_the_head_is_asked_for_an_answer_before_ray_joins(address, asked, joined, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    join_ray({"log_to_driver": False})
    assert joined == [asked, {"log_to_driver": False}]


def test_ray_starts_where_the_address_names_no_cluster(joined, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    join_ray({})
    assert joined == [{}]


def test_auto_without_a_ray_on_this_machine_is_one_sentence(joined, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    with pytest.raises(ValueError, match=r"^RAY_ADDRESS is auto, but no Ray runs on this machine; start one, correct"):
        join_ray({})
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    monkeypatch.setattr("nemo_offload_rl.placement.local_ray.answers_at", lambda *arguments: False)
    with pytest.raises(ValueError, match=r"is auto, which stands for 10.0.0.1:6379, but no head .* answers there"):
        join_ray({})
    assert joined == []


@pytest.mark.parametrize("address", [":6379", "head:port", "head:99999", "6379"])
def test_what_is_no_address_is_one_sentence(address, joined, monkeypatch, caplog):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=f"^RAY_ADDRESS is {address}, which names no head of a Ray cluster: "):
        join_ray({})
    assert joined == [] and caplog.records == []


def test_a_head_that_refuses_is_one_sentence(joined, monkeypatch):
    def refuse(**options):
        raise ConnectionError("Failed to connect") from RuntimeError("no\ntoken")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(ValueError, match=r"^RAY_ADDRESS is 10.0.0.1:6379, but Ray cannot join .*: no token; correct"):
        join_ray({})
