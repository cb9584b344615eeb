"""A VOC file whose own name fits no image labels the image named in its content, if this is unambiguous."""

from __future__ import annotations

import pytest

from data.labels.findings import NAMED_OTHERWISE, ORPHAN
from tests.data.source.labeled_folder import BOX, NUM_IMAGES, write_one_labeled_of_two, write_voc
from tests.helpers.three_formats import voc_text


def test_the_own_name_of_an_unused_voc_file_decides_before_the_image_that_it_names(folder):
    write_voc(folder, "voc/{}.xml")
    images = [f"images/train/unread{i}.heic" for i in range(NUM_IMAGES)]
    for i, image in enumerate(images):
        (folder.root / image).write_bytes(b"x")
        annotation = voc_text([BOX], ["a"], 48, 64).replace("<annotation>", "<annotation><filename>00.png</filename>")
        folder.label(f"voc/unread{i}.xml", annotation)
    lines = [line for line in folder.index(max_bad=1.0).report.lines if "unread" in line and ORPHAN in line]
    assert len(lines) == NUM_IMAGES
    assert all(f"{image} is of an unsupported kind" in "".join(lines) for image in images)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_copies_of_a_voc_file_that_write_the_name_of_the_image_in_two_ways_label_it(folder, encoding):
    folder.more = "annotations: voc\n"
    folder.image("images/train/a/x.png")
    for copy, name in (("one.xml", "x.png"), ("two.xml", "a/x.png")):
        text = voc_text([BOX], ["a"], 48, 64).replace("<annotation>", f"<annotation><filename>{name}</filename>")
        folder.label(f"voc/{copy}", text).write_bytes(text.encode(encoding))
    index = folder.index(max_bad=0.0)
    assert len(index.labels(0)) == 1
    assert index.report.problems == 0


def test_a_voc_file_names_the_image_of_its_own_folder(folder):
    text = write_one_labeled_of_two(folder)
    folder.label("voc/b/other.xml", text.replace(">30<", ">31<"))
    index = folder.index(max_bad=0.0)
    assert [index.labels(i)[0, 3] * 64 for i in range(2)] == pytest.approx([20, 21])
    assert index.report.problems == 0


def test_a_voc_file_names_an_image_of_which_other_folders_have_the_same_name(folder):
    """The file is where the label files of the first image are expected."""
    write_one_labeled_of_two(folder)
    folder.image("images/train/x.png")
    text = voc_text([(0, 1, 1, 9, 9)], ["a"], 48, 64)
    folder.label("voc/1.xml", text.replace("<annotation>", "<annotation><filename>x.png</filename>"))
    index = folder.index(max_bad=0.0)
    assert {path: len(index.labels(i)) for i, path in enumerate(index.paths)} == {
        "images/train/a/x.png": 1,
        "images/train/b/x.png": 0,
        "images/train/x.png": 1,
    }


def test_an_image_that_two_unused_files_may_label_is_lost_once_and_the_objects_of_both(folder):
    folder.write()
    folder.image("images/train/x.png")
    folder.label("labels/train/x-0.txt")
    folder.label("labels/train/x-1.txt")
    index = folder.index()
    assert len(index) == NUM_IMAGES
    assert index.report.ledger.loss_summary() == "1 of 21 images and 2 of 22 labeled objects"
    assert index.report.totals[ORPHAN] == 2


def test_an_image_that_an_unused_voc_file_may_name_is_no_background(folder):
    """The file has other labels than the image of this name in the other folder."""
    text = write_one_labeled_of_two(folder)
    folder.label("voc/other.xml", text.replace(">30<", ">31<"))
    index = folder.index(max_bad=0.5)
    assert list(index.paths) == ["images/train/a/x.png"]
    assert index.report.ledger.lost_images == 1
    assert index.report.lines[0].startswith("voc/other.xml: label file without an image: ")


@pytest.mark.parametrize("count", [2, NUM_IMAGES])
def test_voc_files_that_name_each_others_images_are_reported(folder, lines, count):
    """Their own names decide; a <filename> of no image is only old."""
    write_voc(folder, "voc/{}.xml", "old{}.png")
    for i in range(count):
        path = folder.root / "voc" / f"{i:02}.xml"
        path.write_text(path.read_text().replace(f"old{i:02}.png", f"C:\\x\\{(i + 1) % count:02}.JPG"))
    index = folder.index(max_bad=0.0)
    assert len(index.classes) == NUM_IMAGES
    assert index.report.totals[NAMED_OTHERWISE] == count
    text = r"voc/00.xml: it names C:\x\01.JPG, but is named like images/train/00.png"
    warning = f"{count} of 20 label files declare a <filename> other than their own name, which is used; first {text}"
    assert (warning in lines.text) == (count > 2)


def test_files_that_name_other_images_are_counted_among_label_files(folder, lines):
    """A tenth of the label files is much; of the images, most of which have none, it would be little."""
    write_voc(folder, "voc/{}.xml", "old{}.png")
    for i in range(4, NUM_IMAGES):
        (folder.root / "voc" / f"{i:02}.xml").unlink()
    for i in (0, 1):
        path = folder.root / "voc" / f"{i:02}.xml"
        path.write_text(path.read_text().replace(f"old{i:02}.png", f"{1 - i:02}.png"))
    folder.index(max_bad=1.0)
    assert "2 of 4 label files declare a <filename> other than their own name, which is used; first " in lines.text


@pytest.mark.parametrize("is_same", [True, False])
def test_two_voc_files_that_name_one_image(folder, is_same):
    write_voc(folder, "voc/annotation{}.xml")
    text = (folder.root / "voc/annotation03.xml").read_text()
    folder.label("voc/second.xml", text if is_same else text.replace(">30<", ">31<"))
    index = folder.index()
    assert len(index) == len(index.classes) == (NUM_IMAGES if is_same else NUM_IMAGES - 1)
    assert index.report.ledger.lost_images == (0 if is_same else 1)
