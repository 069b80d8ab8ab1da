"""The table of peers in the docs is what the files in this folder say of themselves."""

import collections

import pytest
from listing import list_files, read_files, shown_tables, tables, versions_shown


def test_every_excluded_case_exists_and_has_a_reason():
    for file, peers in read_files():
        for peer in peers:
            cases = collections.Counter(peer.cases())
            assert cases and max(cases.values()) == 1, f"{file}: no cases, or two of one name"
            assert set(peer.reasons) <= set(cases), f"{file}: excludes what is no case"
            if peer.in_suite is not None:
                some = list(peer.in_suite())
                assert len(set(some)) == len(some) and set(some) < set(cases), file
            assert all(reason.strip() for reason in peer.reasons.values())


def test_the_page_shows_what_the_files_say():
    """Another version of a library has other programs, so only its own can be compared."""
    shown = versions_shown()
    found = {peer.source: peer.version for _, peers in read_files() for peer in peers}
    if any(shown.get(name, version) != version for name, version in found.items()):
        pytest.skip(f"the page was written with {shown}, here are {found}")
    assert shown_tables() == tables(), "run python tests/peers/listing.py"


def test_every_file_is_listed():
    listed = shown_tables()
    for file in list_files():
        assert f"`{file}`" in listed
