"""The tables of real weights are those of the recorded results, and the losses are TRL's."""

import json

from benchmarks import real_weights


def test_the_pages_have_the_tables_of_the_results() -> None:
    results = json.loads(real_weights.RESULTS.read_text(encoding="utf-8"))
    page = real_weights.PAGE.read_text(encoding="utf-8")
    begin, end = real_weights.MARKS
    assert page.split(begin)[1].split(end)[0].strip() == real_weights.format_table(results)
    readme = real_weights.README.read_text(encoding="utf-8")
    assert real_weights.format_readme_row(results) in readme
    for result in results.values():
        for form in real_weights.PRESETS.keys() & result.keys():
            losses = result[form]
            assert len(losses["isotype"]) == result["steps"]
            assert losses["max"] <= (1e-4 if form == "dpo-fp32" else 0.05)
            assert losses["isotype"][-1] != losses["isotype"][0]
        for part in result.keys() & {"errors", "head"}:
            own, plain = (result[part][side] for side in ("isotype", "transformers"))
            assert all(own[name] <= 1.1 * plain[name] for name in own)
