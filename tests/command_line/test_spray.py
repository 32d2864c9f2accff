"""`lrpfx spray`, and `lrpfx dataset` with clusters."""

import csv

import numpy as np
import pytest
from command_line.commands import run, run_program
from PIL import Image
from virelay.model import Project

import lrpfx.datasets

NAMES = ["crane", "ant", "bee", "cow", "dog"]
WITH = ("--weights", "weights.pt", "--raw", "--size", "8", "--categories", "names.txt", "--output", "store")
EXPLAINED = ("dataset", "small_model:make", "photos", *WITH, "--target", "true")
QUICK = ("--neighbors", "3", "--clusters", "2,3")


@pytest.fixture
def classes(folder):
    """Photographs in the folders of two classes: those of the ant are bright on the left or on the right."""
    (folder / "names.txt").write_text("\n".join(NAMES))
    random = np.random.default_rng(0)
    for name in ("ant", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(16):
            pixels = random.integers(0, 60, (10, 12, 3))
            if name == "ant":
                pixels[:, 6 * (number % 2) :][:, :6] += 190
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "photos" / name / f"{number:02}.png")
    return folder


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_clusters_of_a_data_set(classes):
    status, printed = run(*EXPLAINED, "--spray", "clusters", *QUICK)
    assert status == 0 and "32 of 32 photographs explained" in printed and "eigengap" in printed
    found = lrpfx.datasets.spray(lrpfx.datasets.open("store"), neighbors=3, clusters=(2, 3), embeddings=())
    rows = table("clusters/clusters.csv")
    assert {(row["class"], row["name"]) for row in rows} == {("1", "ant"), ("4", "dog")}
    for label in (1, 4):
        mine = [row for row in rows if row["class"] == str(label)]
        assert len(mine) == found[label].best and {row["eigengap"] for row in mine} == {str(found[label].eigengap)}
        assert sum(int(row["samples"]) for row in mine) == 16
        assert all(key.startswith(f"{NAMES[label]}/") for row in mine for key in row["typical"].split("; "))
    assert found[1].best == 2
    samples = [row for row in table("clusters/samples.csv") if row["class"] == "1"]
    clusters = [row["cluster"] for row in samples]
    assert [row["key"] for row in samples] == [f"ant/{number:02}.png" for number in range(16)]
    assert clusters == clusters[:2] * 8 and len(set(clusters)) == 2
    pictures = {path.name: path.read_bytes() for path in sorted((classes / "clusters").glob("*.png"))}
    assert list(pictures) == ["class-1.png", "class-4.png"]

    status, _ = run("spray", "store", "--output", "again", "--photographs", "photos", *QUICK)
    assert status == 0 and table("again/samples.csv") == table("clusters/samples.csv")
    assert {path.name: path.read_bytes() for path in (classes / "again").glob("*.png")} == pictures
    assert run("spray", "store", "--output", "plain", *QUICK)[0] == 0
    assert (classes / "plain" / "class-1.png").read_bytes() != pictures["class-1.png"]


def test_a_project_of_a_data_set(classes):
    (classes / "photos" / "dog" / "99.png").write_bytes(b"no picture")
    status, printed = run_program(*EXPLAINED, "--virelay", "project", *QUICK)
    assert status == 2 and "32 of 33 photographs explained" in printed and "virelay project/project.yaml" in printed
    assert not (classes / "clusters").exists()
    status, _ = run("spray", "store", "-o", "clusters", "--photographs", "photos", "--virelay", "other", *QUICK)
    assert status == 0
    found = lrpfx.datasets.spray(lrpfx.datasets.open("store"), neighbors=3, clusters=(2, 3))
    for path in ("project", "other"):
        project = Project(f"{path}/project.yaml")
        assert [one.name for one in project.label_map.labels] == NAMES and len(project.dataset) == 33
        assert [one.human_readable_name for one in project.get_analysis_categories("SpRAy")] == ["ant", "dog"]
        read = project.get_analysis("SpRAy", "01", "kmeans-02", "tsne")
        assert (read.clustering == found[1].clustering(2).assignment).all()
        with Image.open("photos/ant/03.png") as photograph:
            seen = np.asarray(photograph.resize((8, 8), Image.Resampling.BILINEAR, (1, 0, 11, 10)))
        assert np.abs(project.get_sample(3).data.astype(int) - seen).max() <= 1
        project.close()


def test_maps_without_positions_have_no_pictures(classes):
    assert run(*EXPLAINED, "--reduce", "channels", "--spray", "clusters", *QUICK)[0] == 0
    assert sorted(path.name for path in (classes / "clusters").iterdir()) == ["clusters.csv", "samples.csv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("spray", "store", "-o", "clusters", "--virelay", "project"), "pass --photographs too"),
        (("spray", "store", "-o", "photos/clusters", "--photographs", "photos"), "whose photographs would be others"),
        ((*EXPLAINED, "--virelay", "project", "--scores", "2"), "leave out --scores"),
        ((*EXPLAINED, "--virelay", "project", "--reduce", "channels"), "leaves nothing of"),
        (("spray", "store", "-o", "store/clusters"), "is in the store store"),
        ((*EXPLAINED, "--target", "predicted", "--spray", "clusters"), "pass --target predicted or --target true"),
        ((*EXPLAINED[:-1], "dog", "--spray", "clusters"), "pass --target predicted or --target true"),
        ((*EXPLAINED, "--virelay", "photos/project"), "whose photographs would be others"),
        (
            ("spray", "store", "-o", "clusters", "--clusters", "30"),
            "no class can be clustered: class 1: it has 16",
        ),
        (("spray", "store", "-o", "clusters", "--clusters", "two"), "not a comma-separated list"),
        (
            ("spray", "store", "-o", "clusters", "--photographs", "images", *QUICK),
            "the data set has 3 samples, and the store",
        ),
        (("spray", "nowhere", "-o", "clusters"), "there is no store nowhere"),
    ],
)
def test_mistakes_with_clusters(arguments, message, classes):
    if "dataset" not in arguments:
        run(*EXPLAINED)
    with pytest.raises(lrpfx.LrpfxError, match=message):
        run(*arguments)
    assert not (classes / "project").exists() and (classes / "store").exists() == ("dataset" not in arguments)
