// Samples of a CUDA context's warps by CUPTI, while kernels run beside each other as they always do: of each multiprocessor, every 2^period cycles,
// where one of its warps stands, and why. Binaries that are loaded from begin() on, and samples, become files. Errors are lines on stderr.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cuda.h>
#include <cupti.h>
#include <cupti_pcsampling.h>

#define CHECK(call) do { CUptiResult result = (call); if (result) { const char* text; cuptiGetResultString(result, &text); \
  fprintf(stderr, "%s: %s\n", #call, text); } } while (0)
#define PARAMS(type, name) CUpti_PCSampling##type##Params name = {.size = CUpti_PCSampling##type##ParamsSize, .ctx = context}

enum { MOST_PLACES = 100000, SCRATCH_BYTES = 64 << 20 };   // instructions that were met; CUPTI's own memory
static CUcontext context;
static CUpti_SubscriberHandle subscriber;
static char** names;        // of reasons
static uint32_t* numbers;   // of these
static size_t reasons;
static CUpti_PCSamplingData samples;
static char folder[512];

static void loaded(void* user, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* what) {
  static int count;
  if (domain != CUPTI_CB_DOMAIN_RESOURCE || id != CUPTI_CBID_RESOURCE_MODULE_LOADED) return;
  const CUpti_ModuleResourceData* module = ((const CUpti_ResourceData*)what)->resourceDescriptor;
  char path[600];
  snprintf(path, sizeof path, "%s/%04d.cubin", folder, count++);
  FILE* file = fopen(path, "wb");
  if (!file) { perror(path); return; }
  fwrite(module->pCubin, 1, module->cubinSize, file);
  fclose(file);
}

// of the thread's current context
void begin(int period, const char* to) {
  snprintf(folder, sizeof folder, "%s", to);
  cuCtxGetCurrent(&context);
  CHECK(cuptiSubscribe(&subscriber, (CUpti_CallbackFunc)loaded, NULL));
  CHECK(cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_MODULE_LOADED));
  PARAMS(Enable, enable);
  CHECK(cuptiPCSamplingEnable(&enable));
  PARAMS(GetNumStallReasons, count);
  count.numStallReasons = &reasons;
  CHECK(cuptiPCSamplingGetNumStallReasons(&count));
  names = calloc(reasons, sizeof *names);
  numbers = calloc(reasons, sizeof *numbers);
  for (size_t i = 0; i < reasons; i++) names[i] = calloc(1, CUPTI_STALL_REASON_STRING_SIZE);
  PARAMS(GetStallReasons, get);
  get.numStallReasons = reasons, get.stallReasonIndex = numbers, get.stallReasons = names;
  CHECK(cuptiPCSamplingGetStallReasons(&get));
  samples.size = sizeof samples, samples.collectNumPcs = MOST_PLACES;
  samples.pPcData = calloc(MOST_PLACES, sizeof *samples.pPcData);
  for (int i = 0; i < MOST_PLACES; i++) {
    samples.pPcData[i].size = sizeof *samples.pPcData;
    samples.pPcData[i].stallReason = calloc(reasons, sizeof *samples.pPcData[i].stallReason);
  }
  CUpti_PCSamplingConfigurationInfo wanted[] = {
    {.attributeType = CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_SAMPLING_PERIOD, .attributeData.samplingPeriodData.samplingPeriod = period},
    {.attributeType = CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_STALL_REASON,
     .attributeData.stallReasonData = {.stallReasonCount = reasons, .pStallReasonIndex = numbers}},
    {.attributeType = CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_SCRATCH_BUFFER_SIZE,
     .attributeData.scratchBufferSizeData.scratchBufferSize = SCRATCH_BYTES},
    {.attributeType = CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_COLLECTION_MODE,
     .attributeData.collectionModeData.collectionMode = CUPTI_PC_SAMPLING_COLLECTION_MODE_CONTINUOUS},
    {.attributeType = CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_ENABLE_START_STOP_CONTROL,
     .attributeData.enableStartStopControlData.enableStartStopControl = 1},
    {.attributeType = CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_SAMPLING_DATA_BUFFER,
     .attributeData.samplingDataBufferData.samplingDataBuffer = &samples}};
  CUpti_PCSamplingConfigurationInfoParams all = {.size = CUpti_PCSamplingConfigurationInfoParamsSize, .ctx = context,
                                                 .numAttributes = sizeof wanted / sizeof *wanted, .pPCSamplingConfigurationInfo = wanted};
  CHECK(cuptiPCSamplingSetConfigurationAttribute(&all));
}

void start(void) { PARAMS(Start, params); CHECK(cuptiPCSamplingStart(&params)); }

// a line an instruction: kernel, offset, and of each reason its name = samples
void stop(const char* path) {
  PARAMS(Stop, params);
  CHECK(cuptiPCSamplingStop(&params));
  if (samples.droppedSamples || samples.remainingNumPcs || samples.hardwareBufferFull)
    fprintf(stderr, "%lu samples dropped, %lu instructions left out, the card's buffer full: %d; a longer period has fewer\n",
            (unsigned long)samples.droppedSamples, (unsigned long)samples.remainingNumPcs, samples.hardwareBufferFull);
  FILE* file = fopen(path, "w");
  if (!file) { perror(path); return; }
  for (size_t i = 0; i < samples.totalNumPcs; i++) {
    const CUpti_PCSamplingPCData* place = &samples.pPcData[i];
    fprintf(file, "%s %lu", place->functionName ? place->functionName : "?", (unsigned long)place->pcOffset);
    for (size_t j = 0; j < place->stallReasonCount; j++) for (size_t k = 0; k < reasons; k++)
      if (place->stallReason[j].samples && numbers[k] == place->stallReason[j].pcSamplingStallReasonIndex)
        fprintf(file, " %s=%u", names[k], place->stallReason[j].samples);
    fputc('\n', file);
  }
  fclose(file);
}
