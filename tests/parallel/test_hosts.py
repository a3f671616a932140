import pytest

from lnn_lightning.parallel.hosts import Host, hosts_in_words, ranks_in_words, split_group_warning

A, B, C = (Host(name, "boot", 1) for name in "abc")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 0], "ranks 0, 1"), ([0, 1, 2, 3, 6], "ranks 0 to 3, 6"), ([0, 2], "ranks 0, 2")],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert ranks_in_words(ranks) == text


def test_hosts_in_words() -> None:
    assert hosts_in_words([A, A, B, B], [1, 2, 3]) == "a (rank 1), b (ranks 2, 3)"


@pytest.mark.parametrize(
    ("hosts", "size"), [([A] * 4, 4), ([A] * 4 + [B] * 4, 4), ([A] * 4 + [B] * 2, 2), ([A, B, C], 1)]
)
def test_tensor_groups_on_one_host(hosts: list[Host], size: int) -> None:
    assert split_group_warning(hosts, size) is None


def test_tensor_groups_that_do_not_divide() -> None:
    text = split_group_warning([A] * 3 + [B] * 3, 2) or ""
    assert "1 of 3 tensor groups" in text
    assert "over a (rank 2), b (rank 3)." in text
    assert "does not divide the processes of every host (3 on a, 3 on b). Sizes that do: 1;" in text
    assert "Sizes that do: 1, 2, 3;" in (split_group_warning([A] * 6 + [B] * 6, 4) or "")


def test_ranks_that_go_round_the_hosts() -> None:
    text = split_group_warning([A, B] * 4, 4) or ""
    assert "2 of 2 tensor groups" in text
    assert "--distribution=block" in text
