from pathlib import Path

from isotype.doctor.output import as_sarif
from isotype.finding import Finding, Place, Severity


def test_levels_paths_and_places(tmp_path):
    findings = [
        Finding(code="DT001", severity=Severity.ERROR, message="wrong", place=Place(file=str(tmp_path / "a" / "b.py"), line=3), fix="cast"),
        Finding(code="DT001", severity=Severity.NOTE, message="no file"),
        Finding(code="SH001", severity=Severity.WARNING, message="outside", place=Place(file="/elsewhere/x.py", symbol="f")),
    ]
    results = as_sarif(findings, root=tmp_path)["runs"][0]["results"]
    assert [r["level"] for r in results] == ["error", "note", "warning"]
    assert [r["ruleIndex"] for r in results] == [0, 0, 1]
    assert results[0]["message"]["text"] == "wrong\nfix: cast"
    assert results[0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a/b.py"
    assert "locations" not in results[1]
    place = results[2]["locations"][0]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == Path("/elsewhere/x.py").as_uri()
    assert place["logicalLocations"] == [{"fullyQualifiedName": "f"}]
