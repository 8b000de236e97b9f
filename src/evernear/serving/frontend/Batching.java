package evernear;

import java.lang.reflect.Field;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.LinkedBlockingDeque;
import java.util.concurrent.TimeUnit;
import org.pytorch.serve.job.Job;
import org.pytorch.serve.wlm.Model;
import org.pytorch.serve.wlm.ModelManager;
import org.pytorch.serve.wlm.ModelVersionedRefs;

/**
 * Lets a single request start without waiting for further requests.
 *
 * <p>TorchServe lets each batch that is not full wait for {@code maxBatchDelay}, which is at least 1 ms and longer than
 * an embedding takes. With this class, a batch waits only if the previous batch had several requests.
 */
final class Batching {
    private Batching() {}

    /**
     * Applies to all models, including models that are registered later.
     *
     * <p>Call this when TorchServe has registered the models of its configuration. Seconds pass before their workers
     * ask for requests.
     */
    static void install() {
        Models models = new Models();
        ModelManager manager = ModelManager.getInstance();
        models.putAll(get(manager, "modelsNameMap"));
        models.values().forEach(Batching::apply);
        try {
            field(manager, "modelsNameMap").set(manager, models);
        } catch (ReflectiveOperationException fault) {
            throw new IllegalStateException(fault);
        }
    }

    private static void apply(ModelVersionedRefs versions) {
        versions.getAllVersions().forEach(version -> apply(version.getValue()));
    }

    private static void apply(Model model) {
        Map<String, LinkedBlockingDeque<Job>> queues = get(model, "jobsDb");
        queues.computeIfPresent(
                Model.DEFAULT_DATA_QUEUE,
                (name, queue) -> queue instanceof Queue ? queue : new Queue(queue.remainingCapacity()));
    }

    @SuppressWarnings("unchecked")
    private static <T> T get(Object object, String name) {
        try {
            return (T) field(object, name).get(object);
        } catch (ReflectiveOperationException fault) {
            throw new IllegalStateException(fault);
        }
    }

    private static Field field(Object object, String name) throws ReflectiveOperationException {
        Field field = object.getClass().getDeclaredField(name);
        field.setAccessible(true);
        return field;
    }

    /** TorchServe's models. TorchServe adds each new version here before it starts the version's workers. */
    private static final class Models extends ConcurrentHashMap<String, ModelVersionedRefs> {
        @Override
        public ModelVersionedRefs putIfAbsent(String name, ModelVersionedRefs versions) {
            apply(versions);
            return super.putIfAbsent(name, versions);
        }
    }

    /**
     * The requests for a model. To collect a batch, TorchServe holds a lock. It waits without limit for the first
     * request, and up to a delay for each further request.
     */
    private static final class Queue extends LinkedBlockingDeque<Job> {
        private int batchSize;
        private boolean waits;

        Queue(int capacity) {
            super(capacity);
        }

        @Override
        public Job poll(long timeout, TimeUnit unit) throws InterruptedException {
            boolean isFirst = timeout == Long.MAX_VALUE;
            if (isFirst) {
                waits = batchSize > 1;
                batchSize = 0;
            }
            Job job = isFirst || waits ? super.poll(timeout, unit) : poll();
            if (job != null) {
                batchSize++;
            }
            return job;
        }
    }
}
