"""recipes.job: parents, overlays and flags; one clear message for every mistake; and the way back to TOML."""

import copy
import os
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import tomli_w

import registry
from components.data.config import SourceConfig
from recipes import pretrain
from recipes.job import Job, completed, differences, load, load_or_exit, refused_changes, to_table, write_resolved
from registry import RecipeError

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPES = REPOSITORY / "train_configs"
DEBUG = str(RECIPES / "hymo_debug.toml")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a recipe into the (temporary) working directory; by default a child of the debug recipe."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "x.toml", base: str | None = DEBUG) -> str:
        head = f'base = "{base}"\n' if base else ""
        (tmp_path / name).write_text(head + textwrap.dedent(text))
        return name

    return write


def job(config_file: str, *flags: str, **facts) -> Job:
    words = shlex.split(" ".join(flags))
    return load(["--job.config_file", config_file, *words], **{"needs_data": False} | facts)


def told(config_file: str, *flags: str, **facts) -> list[str]:
    with pytest.raises(RecipeError) as error:
        job(config_file, *flags, **facts)
    return str(error.value).splitlines()


# Parents, overlays, flags -----------------------------------------------------------------------------


def test_every_recipe_of_a_whole_model_is_valid():
    for path in sorted(RECIPES.glob("*.toml")):
        assert job(str(path)).training.steps > 0, path


OVERLAYS = sorted(p.stem for p in (RECIPES / "scales").glob("*.toml"))
CHIMERA_SIZES, SWARM_SIZES = ([name for name in OVERLAYS if name.startswith(family)] for family in ("chimera", "swarm"))
FITTING = {
    ("hymo_primary", "hymo_small", "hymo_large"): sorted({*OVERLAYS} - {*CHIMERA_SIZES, *SWARM_SIZES}),
    ("chimera_510m", "chimera_279m", "chimera_1_1b", "chimera_1b_v2", "uffn_640", "uffn_640_ghost"): CHIMERA_SIZES,
    ("swarm_blackwell_v2", "swarm_blackwell_v1", "swarm_354m", "swarm_spark"): SWARM_SIZES,
}


@pytest.mark.parametrize(("names", "overlay"), [(names, o) for names, overlays in FITTING.items() for o in overlays])
def test_every_overlay_fits_every_recipe_of_its_family(names, overlay):
    for name in names:
        assert job(str(RECIPES / f"{name}.toml"), "--job.overlay", str(RECIPES / "scales" / f"{overlay}.toml")), name


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(recipe):
    name = recipe("[training]\nsteps = 7\nmax_norm = 2.0\n")
    found = job(name, "--training.steps", "9").training
    assert (found.steps, found.max_norm, found.max_skipped_steps) == (9, 2.0, 10)


def test_a_child_table_without_a_name_edits_its_parent_and_one_with_a_name_starts_afresh(recipe):
    edited = job(recipe("[optimizer.matrix]\nlr = 0.5\n")).optimizer.matrix
    assert (edited.name, edited.config.lr, edited.config.ns_dtype) == ("normuon", 0.5, "float32")
    fresh = job(recipe('[optimizer.matrix]\nname = "normuon"\nlr = 0.5\n')).optimizer.matrix
    assert (fresh.config.lr, fresh.config.ns_dtype) == (0.5, "bfloat16")


def test_lists_are_replaced_whole(recipe):
    assert job(recipe('[validation]\nprompts = ["a"]\n')).validation.prompts == ("a",)


def test_a_title_starts_a_table_of_labels_afresh(recipe):
    name = recipe('[data.sources]\nname = "mine"\na = { path = "p", weight = 2 }\n')
    assert job(name).data.sources == {"a": SourceConfig(path="p", weight=2.0)}


def test_a_label_may_be_called_name(recipe):
    text = '[data.sources]\nname = { path = "x", weight = 1.0 }\n'
    assert set(job(recipe(text)).data.sources) == {"sotu", "shakespeare", "name"}


def test_an_optional_part_is_taken_away_by_the_name_none(recipe):
    assert job(recipe('[model.mtp]\nname = "none"\n')).model.config.mtp is None
    assert job(DEBUG, "--model.mtp.name", "none").model.config.mtp is None


def test_overlays_lie_over_the_root_and_below_the_children(recipe):
    recipe("[training]\nsteps = 5\nmax_norm = 5.0\n", "child.toml")
    recipe("[training]\nmax_norm = 6.0\n", "grandchild.toml", base="child.toml")
    recipe("[training]\nsteps = 100\nseq_len = 64\nmax_norm = 9.0\n", "first.toml", base=None)
    recipe("[training]\nseq_len = 32\n", "second.toml", base=None)
    found = job("grandchild.toml", "--job.overlay", "first.toml", "--job.overlay=second.toml")
    assert (found.training.steps, found.training.seq_len, found.training.max_norm) == (5, 32, 6.0)
    assert found.job.overlay == ("first.toml", "second.toml")


def test_overlays_that_recipes_name_lie_below_those_of_the_command_line(recipe):
    recipe("[training]\nsteps = 1\nseq_len = 16\nmax_norm = 1.0\n", "first.toml", base=None)
    recipe("[training]\nsteps = 2\nseq_len = 32\n", "second.toml", base=None)
    recipe("[training]\nsteps = 3\n", "third.toml", base=None)
    recipe('overlays = ["first.toml"]\n', "child.toml")
    recipe('overlays = ["second.toml"]\ntraining.max_norm = 4.0\n', "grandchild.toml", base="child.toml")
    found = job("grandchild.toml", "--job.overlay", "third.toml")
    assert (found.training.steps, found.training.seq_len, found.training.max_norm) == (3, 32, 4.0)
    assert (found.job.overlay, found.job.dump_folder) == (("third.toml",), "outputs/grandchild-third")


def test_a_child_that_renames_a_part_means_the_same_under_an_overlay_that_edits_the_part(recipe):
    recipe('[optimizer.matrix]\nname = "adamw"\nlr = 0.1\n', "child.toml")
    recipe("[optimizer.matrix]\nmomentum = 0.5\n", "overlay.toml", base=None)
    assert job("child.toml", "--job.overlay", "overlay.toml").optimizer.matrix.name == "adamw"


def test_each_recipe_and_overlay_has_a_dump_folder_of_its_own(recipe):
    recipe("", "overlay.toml", base=None)
    assert job(DEBUG).job.dump_folder == "outputs/hymo_debug"
    assert job(recipe(""), "--job.overlay", "overlay.toml").job.dump_folder == "outputs/x-overlay"
    assert job(recipe('[job]\ndump_folder = "here"\n')).job.dump_folder == "here"


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--compile.enable"], True),
        (["--compile.enable=true"], True),
        (["--compile.enable", "--compile.no_enable"], False),
        (["--compile.enable=false"], False),
    ],
)
def test_a_switch_is_turned_on_and_off_in_every_form(flags, value):
    assert job(DEBUG, *flags).compile.enable is value


def test_a_switch_is_not_turned_by_another_word():
    assert told(DEBUG, "--compile.enable=maybe") == ["command line [compile.enable]: must be bool, not str 'maybe'"]


def test_none_is_a_word_where_it_is_a_choice_and_nothing_where_a_value_is_optional(recipe):
    name = recipe('[activation_checkpoint]\nmode = "full"\n[checkpoint]\ninitial_load_path = "there"\n')
    found = job(name, "--activation_checkpoint.mode none --checkpoint.initial_load_path none")
    assert found.activation_checkpoint.mode == "none"
    assert found.checkpoint.initial_load_path is None


def test_flags_reach_into_components_lists_and_labels():
    found = job(
        DEBUG,
        "--model.mixers.gdn.head_dim 32 --optimizer.matrix.lr=1e-2 --validation.sources sotu shakespeare",
        "--optimizer.scalar.betas 0.8 0.9 --checkpoint.load_step -1 --data.sources.sotu.weight 2",
    )
    assert found.model.config.mixers["gdn"].config.head_dim == 32
    assert found.optimizer.matrix.config.lr == 0.01
    assert found.validation.sources == ("sotu", "shakespeare")
    assert found.optimizer.scalar.config.betas == (0.8, 0.9)
    assert found.data.sources["sotu"].weight == 2.0


def test_a_flag_that_names_another_component_starts_its_table_afresh_and_brings_its_flags():
    matrix = job(DEBUG, "--optimizer.matrix.name", "adamw", "--optimizer.matrix.lr", "3e-4").optimizer.matrix
    assert (matrix.name, matrix.config.lr, matrix.config.weight_decay) == ("adamw", 3e-4, 0.0)


OUTSIDE = """
from dataclasses import dataclass
from registry import register

@register("schedule", "staircase")
class Staircase:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        height: float  # of a step
"""


def test_a_component_outside_the_repository_is_imported_and_has_flags(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_ENTRIES", {kind: dict(names) for kind, names in registry._ENTRIES.items()})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hymo_outside.py").write_text(OUTSIDE)
    name = recipe('[job]\nimports = ["hymo_outside"]\n[lr_scheduler]\nname = "staircase"\nheight = 1.0\n')
    assert job(name, "--lr_scheduler.height 2").lr_scheduler.config.height == 2.0


def test_a_fault_inside_an_imported_module_keeps_its_traceback(recipe, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hymo_faulty.py").write_text("import a_module_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        job(recipe('[job]\nimports = ["hymo_faulty"]\n'))


# Mistakes ---------------------------------------------------------------------------------------------


MISTAKES = {
    "a misspelt key": (
        "[training]\nstpes = 3\n",
        'x.toml [training.stpes]: no key named "stpes". Did you mean "steps"? Known: dtype, ',
    ),
    "a misspelt section": (
        "[trainning]\n",
        'x.toml [trainning]: no section named "trainning". Did you mean "training"?',
    ),
    "a wrong type": ('[training]\nsteps = "3"\n', "x.toml [training.steps]: must be int, not str '3'"),
    "a value where a section belongs": ("training = 3\n", "x.toml [training]: must be table, not int 3"),
    "a value where [job] belongs": ("job = 3\n", "x.toml [job]: must be a table, not 3"),
    "a value where labels belong": (
        "[data]\nsources = 3\n",
        "x.toml [data.sources]: must be labelled tables, not int 3",
    ),
    "a value where a component belongs": (
        "lr_scheduler = 3\n",
        "x.toml [lr_scheduler]: must be schedule table, not int 3",
    ),
    "a value out of range": ("[training]\nsteps = 0\n", "x.toml [training]: steps must be at least 1, not 0"),
    "a wrong choice": (
        '[training]\ndtype = "bf16"\n',
        'x.toml [training.dtype]: no choice named "bf16". Did you mean "bfloat16"? Known: bfloat16, float32',
    ),
    "a missing key": (
        '[optimizer.scalar]\nname = "adamw"\n',
        "x.toml [optimizer.scalar.lr]: lr is missing (float); add it",
    ),
    "a component that does not exist": (
        '[model.mixers.gdn]\nname = "hymo_gnd"\n',
        'x.toml [model.mixers.gdn]: no mixer named "hymo_gnd". Did you mean "hymo_gdn"? Registered: ',
    ),
    "a head count that does not divide": (
        "[model.mixers.mla]\nheads = 5\n",
        "x.toml [model.mixers.mla]: heads = 5 do not divide among kv_heads = 2; ",
    ),
    "a label that does not exist": (
        '[model.zones.trunk]\npattern = ["mla", "gnd"]\n',
        'x.toml [model.zones.trunk.pattern]: no block named "gnd". Did you mean "gdn"?',
    ),
    "a vocabulary that does not match the tokenizer": (
        "[model]\nvocab_size = 5000\n",
        "x.toml [model.vocab_size]: 5000, but tokenizer hymo_bpe_4k has 4096 ids; state the same number in both",
    ),
    "a global batch that is no multiple of the local one": (
        "[training]\nlocal_batch_size = 8\nglobal_batch_size = 17\n",
        "x.toml [training.global_batch_size]: 17 is not a multiple of local_batch_size 8; the nearest is 16 or 24",
    ),
    "a validation source that is not in the mixture": (
        '[validation]\nsources = ["sot"]\n',
        'x.toml [validation.sources.0]: no source named "sot". Did you mean "sotu"?',
    ),
    "a part to compile that does not exist": (
        '[compile]\ncomponents = ["gdnn"]\n',
        'x.toml [compile.components.0]: no part named "gdnn". Did you mean "gdn"?',
    ),
    "a part to recompute that does not exist": (
        '[activation_checkpoint]\ncomponents = ["mlaa"]\n',
        'x.toml [activation_checkpoint.components.0]: no part named "mlaa". Did you mean "mla"?',
    ),
    "recomputing by op what is compiled": (
        '[compile]\nenable = true\n[activation_checkpoint]\nmode = "selective"\n',
        'x.toml [compile.components]: recomputing by "op" sees operations one by one, and a compiled part is a single ',
    ),
    "recomputing parts of compiled blocks": (
        '[compile]\nenable = true\n[activation_checkpoint]\nmode = "full"\ncomponents = ["gdn"]\n',
        "x.toml [compile.components]: a part that is recomputed by itself inside a compiled block would run uncompiled",
    ),
    "recording nothing": (
        "[cuda_graph]\nenable = true\ncomponents = []\n",
        "x.toml [cuda_graph.components]: names nothing to record; name parts, or set enable = false",
    ),
    "recording a mixer that does not exist": (
        '[cuda_graph]\nenable = true\ncomponents = ["mlaa"]\n',
        'x.toml [cuda_graph.components.0]: no part named "mlaa". Did you mean "mla"?',
    ),
    "recording an optimizer by another spelling": (
        '[cuda_graph]\nenable = true\ncomponents = ["model", "optimiser"]\n[parallelism]\nplan = "zero1"\n',
        'x.toml [cuda_graph.components.1]: no part named "optimiser". Did you mean "optimizer"?',
    ),
    "recording a mixer with fp32 units": (
        '[cuda_graph]\nenable = true\ncomponents = ["gdn"]\n',
        'x.toml [cuda_graph.components]: mixer "gdn" has parts in sharded fp32 units of their own, whose weights move',
    ),
    "recording a mixer that loops": (
        "[cuda_graph]\nenable = true\n[model.zones.trunk]\nloops = 2\n",
        'x.toml [cuda_graph.components]: mixer "mla" runs several times in one micro-batch',
    ),
    "recording with packed documents": (
        '[cuda_graph]\nenable = true\n[data]\npacking = "document"\n',
        "x.toml [cuda_graph.enable]: recorded mixers have no mask of documents",
    ),
    "recording the whole micro-batch where weights move": (
        '[cuda_graph]\nenable = true\ncomponents = ["model"]\n',
        'x.toml [cuda_graph.components]: plan = "fsdp2" moves weights within a micro-batch: record labels of mixers',
    ),
    "recording a mixer beside the whole micro-batch": (
        '[cuda_graph]\nenable = true\ncomponents = ["model", "mla", "optimizer"]\n[parallelism]\nplan = "zero1"\n',
        'x.toml [cuda_graph.components]: plan = "zero1" keeps all weights in place: record "model"',
    ),
    "recording a mixer where the whole micro-batch can be": (
        '[cuda_graph]\nenable = true\n[parallelism]\nplan = "zero1"\n',
        'x.toml [cuda_graph.components]: plan = "zero1" keeps all weights in place: record "model"',
    ),
    "a plan that does not exist": (
        '[parallelism]\nplan = "zero"\n',
        'x.toml [parallelism.plan]: no plan named "zero". Did you mean "zero1"? Registered: fsdp2, zero1',
    ),
    "units of one expert without units": (
        '[parallelism]\nplan = "zero1"\nexpert_wrapping = "per_expert"\n',
        'x.toml [parallelism.expert_wrapping]: plan "zero1" has no units to wrap',
    ),
    "recording what is compiled": (
        '[cuda_graph]\nenable = true\n[compile]\nenable = true\ncomponents = ["mla"]\n',
        'x.toml [cuda_graph.components]: mixer "mla" is recorded whole and cannot be compiled too',
    ),
    "recording what is recomputed": (
        '[cuda_graph]\nenable = true\n[activation_checkpoint]\nmode = "full"\ncomponents = ["mla"]\n',
        'x.toml [cuda_graph.components]: mixer "mla" keeps its activations in the recording, so recomputing it frees ',
    ),
    "a role without an optimizer": (
        '[optimizer.router]\nname = "none"\n',
        "x.toml [optimizer.router]: is missing, but 2 parameters such as layers.0.ffn.router.weight need it",
    ),
    "an optimizer that cannot serve its role": (
        '[optimizer.embedding]\nname = "normuon"\nlr = 0.1\n',
        "x.toml [optimizer.embedding]: normuon serves matrix, expert only; use adamw here",
    ),
    "a flag as a key": (
        '[job]\noverlay = ["a.toml"]\n',
        "x.toml [job.overlay]: is a flag (--job.overlay), not a key of a recipe; remove it",
    ),
    "a module that is not there": (
        '[job]\nimports = ["no_such_module_of_ours"]\n',
        "x.toml [job.imports]: no module 'no_such_module_of_ours' in ",
    ),
}


def test_an_optimizer_can_be_recorded_alone_or_beside_what_the_plan_records(recipe):
    for plan, beside in (("fsdp2", []), ("fsdp2", ["mla"]), ("zero1", []), ("zero1", ["model"])):
        parts = [*beside, "optimizer"]
        sections = f'[parallelism]\nplan = "{plan}"\n[cuda_graph]\nenable = true\ncomponents = {parts}\n'
        assert job(recipe(sections)).cuda_graph.components == tuple(parts)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_gives_one_line_that_says_where_what_and_the_remedy(recipe, mistake):
    text, message = MISTAKES[mistake]
    [line] = told(recipe(text))
    assert line.startswith(message)


def test_all_mistakes_of_files_and_flags_are_told_at_once_each_with_its_origin(recipe):
    recipe("[training]\nsteps = 1.5\n", "parent.toml")
    name = recipe("[metrics]\nlog_freqq = 1\n[model.mixers.mla]\nheads = 5\n", base="parent.toml")
    lines = told(name, "--training.seq_len", "long", "--debug.sed", "1")
    assert sorted(line.split(":")[0] for line in lines) == [
        "command line",
        "command line [training.seq_len]",
        "parent.toml [training.steps]",
        "x.toml [metrics.log_freqq]",
        "x.toml [model.mixers.mla]",
    ]
    assert 'no flag named "--debug.sed". Did you mean "--debug.seed"?' in "\n".join(lines)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--seed", "--data.seed or --debug.seed"),
        ("--model.lr", "--optimizer.matrix.lr or --optimizer.expert.lr or --optimizer.embedding.lr or --optimizer.rou"),
        ("--training.stpes", '"--training.steps"'),
    ],
)
def test_a_flag_of_the_wrong_section_is_told_with_those_of_its_name(flag, meant):
    [line] = told(DEBUG, flag, "1")
    assert line.startswith(f'command line: no flag named "{flag}". Did you mean {meant}')


def test_a_missing_parent_names_its_child_and_the_nearest_file(recipe):
    recipe("", "hymo.toml")
    [line] = told(recipe("", base="hymo_.toml"))
    assert line == 'x.toml [base]: cannot read hymo_.toml (No such file or directory). Did you mean "hymo.toml"?'


def test_overlays_that_are_no_list_or_not_there_are_told_with_the_recipe_that_names_them(recipe):
    assert told(recipe('overlays = "a.toml"\n')) == ["x.toml [overlays]: must be a list of file names, not 'a.toml'"]
    [line] = told(recipe('overlays = ["a.toml"]\n'))
    assert line.startswith("x.toml [overlays]: cannot read a.toml (No such file or directory).")


def test_a_circle_of_parents_is_shown(recipe):
    recipe("", "a.toml", base="b.toml")
    recipe("", "b.toml", base="a.toml")
    assert told("a.toml") == ["b.toml [base]: parents form a circle: a.toml -> b.toml -> a.toml; remove one base"]


def test_a_missing_recipe_broken_toml_and_an_overlay_with_a_parent_are_told(recipe):
    assert told("none.toml") == ["command line: cannot read none.toml (No such file or directory)."]
    assert told(recipe("[training\n"))[0].startswith("x.toml: not valid TOML: ")
    recipe("", "overlay.toml")
    assert told(DEBUG, "--job.overlay", "overlay.toml")[0].startswith("overlay.toml [base]: an overlay has no parent")


def test_ranks_that_cannot_share_the_batch_are_refused_with_the_multiple_they_need(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    [line] = told(DEBUG, "--training.local_batch_size", "8")
    assert "2 micro-batches of 8, which 3 ranks cannot share evenly; make it a multiple of 24" in line
    monkeypatch.setenv("WORLD_SIZE", "2")
    [line] = told(DEBUG, "--parallelism.data_parallel_shard_degree", "4")
    assert "4 shards x 1 copies are 4 ranks, but this run has 2" in line
    [line] = told(DEBUG, "--parallelism.plan", "zero1", "--parallelism.data_parallel_replicate_degree", "2")
    assert '[parallelism.data_parallel_replicate_degree]: plan "zero1" shards over all ranks' in line


def test_missing_text_and_a_missing_tokenizer_are_told_before_a_run(recipe):
    text = '[data.sources]\nname = "mine"\na = { path = "nowhere", weight = 1.0 }\n'
    [line] = told(recipe(text), needs_data=True)
    assert line.startswith("x.toml [data.sources.a]: nowhere does not exist; make it with ")
    [line] = told(recipe('[tokenizer]\npath = "nowhere.tiktoken"\n'), needs_data=True)
    assert line.startswith("x.toml [tokenizer]: tokenizer file nowhere.tiktoken does not exist; ")


def test_text_that_is_too_short_for_a_length_of_validation_is_told_before_a_run():
    lines = told(DEBUG, "--validation.lengths 99999999", needs_data=True)
    assert len(lines) == 1 and "[validation.lengths]" in lines[0]
    assert "0 validation sequences of 99999999, fewer than 1 batches of 1" in lines[0]


def test_a_missing_shard_is_told_before_a_run(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HYMO_DATA_CACHE", str(tmp_path / "cache"))
    job(DEBUG, needs_data=True)
    next((tmp_path / "cache").glob("sotu-*/train-*.bin")).unlink()
    [line] = told(DEBUG, needs_data=True)
    assert "[data.sources.sotu]" in line
    assert "train-00000" in line


def test_a_dump_folder_that_cannot_be_written_is_told_before_a_model_is_built(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "build", lambda *_: pytest.fail("built"))
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"\[job.dump_folder\]: file/run cannot be made, since .*/file is a file"):
        pretrain.train(job(DEBUG, "--job.dump_folder file/run"), None, None)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(RecipeError, match=f"{tmp_path} is not yours to write into; name another folder"):
        pretrain.train(job(DEBUG, "--job.dump_folder not/there/yet"), None, None)


def test_a_command_ends_with_status_2_and_prints_to_stderr_from_one_rank_a_node(capsys, monkeypatch):
    for rank, printed in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as exit:
            load_or_exit(["--job.config_file", "none.toml"])
        assert exit.value.code == 2
        assert ("cannot read none.toml" in capsys.readouterr().err) is printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "which recipe?"),
        (["--job.config_file"], "--job.config_file: expected one argument"),
        (["--job.config_file", DEBUG, "--training.steps"], "'--training.steps'"),
        (["--job.config_file", DEBUG, "stray"], "'stray' belongs to no flag"),
    ],
)
def test_a_flag_without_its_value_and_a_word_without_a_flag_end_with_status_2(capsys, flags, message):
    with pytest.raises(SystemExit) as exit:
        load_or_exit(flags)
    assert exit.value.code == 2
    told = capsys.readouterr()
    assert message in told.err + told.out


def test_a_real_process_shows_all_problems_and_no_traceback(recipe):
    name = recipe("[training]\nstpes = 3\n[model.mixers.mla]\nheads = 5\n")
    command = "import sys; from recipes.job import load_or_exit; load_or_exit(sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", command, "--job.config_file", name], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    assert "Traceback" not in done.stderr


def test_help_lists_the_flags_of_the_recipes_components(capsys):
    with pytest.raises(SystemExit) as exit:
        job(DEBUG, "--help")
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    for words in ("--model.mixers.gdn.head_dim int", "--optimizer.matrix.lr float", "value width V of a head"):
        assert words in shown


# The way back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hymo_debug", "hymo_primary"])
def test_the_resolved_recipe_parses_to_an_equal_job(name, tmp_path):
    first = job(str(RECIPES / f"{name}.toml"), "--training.steps 11 --validation.prompts 'a \"quoted\" line' b")
    write_resolved(first, str(tmp_path))
    assert job(str(tmp_path / "recipe.toml")) == first
    assert (tmp_path / "code.diff").read_text().startswith("commit ")
    assert '"torch"' in (tmp_path / "environment.json").read_text()


def test_a_key_that_came_later_is_as_by_default_in_recipes_written_before():
    new = to_table(job(DEBUG))
    old = copy.deepcopy(new)
    del old["training"]["master_dtype"], old["model"]["mixers"]["gdn"]["chunk"], old["fused_gdn"]
    assert differences(old, new) == refused_changes(old, new) == []
    changed = to_table(job(DEBUG, "--training.master_dtype bfloat16"))
    assert differences(old, changed) == ["training.master_dtype"]
    assert refused_changes(old, changed) == ["training.master_dtype: 'float32' -> 'bfloat16'"]


def test_what_a_run_means_may_not_change_on_resume():
    flags = {
        "model.dim": "32",
        "model.mixers.gdn.rope_theta": "1.5",
        "model.mtp.weights": "0.5 0.5",
        "data.seed": "7",
        "data.packing": "document",
        "data.sources.sotu.weight": "0.9",
        "optimizer.matrix.momentum": "0.5",
        "optimizer.matrix.weight_decay": "0.5",
        "optimizer.scalar.betas": "0.5 0.5",
        "training.global_batch_size": "32",
        "training.seq_len": "64",
        "training.max_norm": "0.5",
        "training.dtype": "bfloat16",
        "debug.seed": "7",
    }
    old, new = to_table(job(DEBUG)), to_table(job(DEBUG, *(f"--{key} {value}" for key, value in flags.items())))
    assert {line.split(":")[0] for line in refused_changes(old, new)} == set(flags)


def test_a_resumed_run_may_take_the_recurrence_in_other_chunks_which_makes_another_recipe_all_the_same():
    old, new = to_table(job(DEBUG)), to_table(job(DEBUG, "--model.mixers.gdn.chunk 32"))
    assert differences(old, new) == ["model.mixers.gdn.chunk"]
    assert refused_changes(old, new) == []


def test_a_key_that_is_gone_makes_another_recipe():
    new = to_table(job(DEBUG))
    old = copy.deepcopy(new)
    old["training"]["gone"] = 1
    assert differences(old, new) == ["training.gone"]


def test_the_table_of_a_recipe_is_complete():
    for path in RECIPES.glob("*.toml"):
        table = to_table(job(str(path)))
        assert completed(table) == table, path


def test_differences_name_the_keys_and_only_what_fixes_the_meaning_is_refused_on_resume():
    old = to_table(job(DEBUG))
    new = to_table(job(DEBUG, "--training.steps 11 --training.seq_len 64 --model.mtp.name none"))
    assert {"training.steps", "training.seq_len", "model.mtp.depth"} <= set(differences(old, new))
    refused = refused_changes(old, new)
    assert "training.seq_len: 128 -> 64" in refused
    assert "model.mtp.name: 'mtp' -> 'not stated'" in refused
    assert not any(line.startswith("training.steps") for line in refused)
    assert refused_changes(old, tomllib.loads(tomli_w.dumps(old))) == []
