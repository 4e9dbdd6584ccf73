"""Every term of the study notes stands in the glossary, in every spelling, and what the glossary points at is there."""

from __future__ import annotations

import importlib
import re
from functools import reduce

import pytest
from conftest import ROOT

PAGE = ROOT / "docs" / "glossary.md"
ROWS = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
POINTER = re.compile(r"\[`([\w/]+\.py)`\]\(([^)]*)\)((?: `[^`]+`)*)")

# As four study notes spell them, each in the order of its text
SPELLINGS = """
자기회귀적 생성, autoregressive generation, 추론, 시작 토큰, BOS, Beginning Of Sequence, 시퀀스 시작, 확률 분포, 샘플링,
Sampling, 컨텍스트, Context, 조건부 확률, 종료 조건, 특별 토큰, EOS, End Of Sequence, 시퀀스 끝, 최대 컨텍스트 길이,
block_size, 포워드 패스, Forward Pass, 입력 시퀀스, 위치 인덱스, pos_id, 모델 순방향 연산, 순방향 연산, 로짓, Logits,
소프트맥스, Softmax, 어휘 사전, Vocabulary, probs, 다음 토큰 샘플링, 토큰 ID, random.choices, 탑-k, Top-k, 탑-p, Top-p,
온도, 온도 매개변수, Temperature, 피드백 루프, 임베딩 연산, 최대 시퀀스 길이, 버퍼, token_id, keys, values, softmax,
vocab_size, 끝 토큰, itos, 문자 복원, 추론 파이프라인, 맥락,

토크나이저, forward, 생성 루프, 위치 인코딩, 멀티헤드, 잔차 연결, 문자열, logits, input_ids, 임베딩, 트랜스포머 블록,
LM Head, 출력 계층, 자기회귀 생성, hidden state, 블록, logit, 원점수, shape, [B, T, V], next_token_logits, 행렬곱,
어텐션, Q, K, V, 어텐션 점수, FFN, √d, 참고 비율, 샘플링 로직, multinomial, 헤드, 학습, 가중치, 정답, loss, backward,
optimizer, 검증, 평가, gradient, 역전파, torch.no_grad(),

프롬프트, 프롬프트 배치, 배치, 토큰화, 디코딩, padding=True, truncation=True, max_length=512, return_tensors, 안전선,
attention_mask, max_new_tokens, num_return_sequences, pad_token_id, eos_token_id, batch_decode, skip_special_tokens,
AutoModelForCausalLM, AutoTokenizer, 서브워드 조각, 텐서, 패딩, 패딩 ID, 정수 인덱스, 임베딩 계층, 자기회귀,
자기회귀 루프, 되먹임, generate_forward_batch, 스트리밍, 마스크드 어텐션, 인과 마스크, hidden states, LM 헤드,
model.generate, prompt_texts,

대규모 언어 모델, 문맥, 정방향 계산, pipeline, 파이프라인, device_map, mps, dtype, 장치, 자료형, return_full_text,
do_sample, ID 시퀀스, do_sample=False, 탐욕적 선택, 상한, 종료 토큰, 중단 조건, 위치 정보, 은닉 벡터, 투영, 어휘,
어휘사전, 토큰 임베딩, 디코딩 전략, Decoding strategy, 탐욕적 디코딩, temperature, top_p, 누적 확률, 문맥 크기,
문맥 길이, 문맥 창, 최종 은닉 벡터, 중간 표현, KV 캐시, 캐싱, 키, 키(K), 값, 값(V), 쿼리(Q), 인과적 마스크, use_cache,
예열, 동기화, 어텐션 층, Attention Layer, 피드포워드 층, Feedforward Layer, 위치별 피드포워드 네트워크,
피드포워드 신경망, 비선형 변환, 중간 차원, 활성화 함수, 인코더-디코더, 교차 어텐션, 디코더, 인과적 셀프 어텐션,
어텐션 메커니즘, 어텐션 헤드, 투영 가중치, 투영 행렬, 쿼리(Query), 키(Key), 값(Value), 관련성 점수, 정보 통합,
셀프어텐션, 셀프 어텐션, 점곱, 어텐션 출력, 로컬/희소 어텐션, 전체 셀프 어텐션, 슬라이딩 윈도, 희소 어텐션,
멀티 쿼리 어텐션, MQA, 그룹 쿼리 어텐션, GQA, 다중 헤드, 다중 헤드 어텐션, 플래시 어텐션, FlashAttention, 정규화,
pre-norm, RMSNorm, SwiGLU, 위치 임베딩, RoPE, Rotary Positional Embedding, 위치 표현, 회전 위치 표현, 회전, 상대적 거리,
메모리 대역폭, 훈련, 첫 토큰까지의 시간
"""


def words(text: str) -> list[str]:
    """What stands between commas, except for commas in brackets."""
    return [word.strip() for word in re.split(r",(?![^\[]*\])", text) if word.strip()]


def test_every_spelling_stands_in_the_table():
    there = {word.lower() for row in ROWS for word in words(f"{row[0]}, {row[1]}")}
    assert not [word for word in words(SPELLINGS) if word.lower() not in there]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip().split(",")[0])
def test_what_a_row_points_at_is_there(row):
    assert len(row) == 4
    found = POINTER.findall(row[3])
    assert found
    assert POINTER.sub("", row[3]).strip(" ;") == ""
    for name, target, names in found:
        path = (PAGE.parent / target).resolve()
        assert path.is_file()
        assert path.as_posix().endswith(name)
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for place in re.findall(r"`([^`]+)`", names):
            if place.startswith("--"):
                assert place[2:] in module.Options.__dataclass_fields__
                continue
            *owners, last = place.split(".")
            owner = reduce(getattr, owners, module)
            fields = getattr(owner, "__dataclass_fields__", {})
            if not hasattr(owner, last) and last not in fields:  # made when an object is
                assert isinstance(owner, type)
                assert f"self.{last}" in path.read_text()
